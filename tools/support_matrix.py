"""Write the tables of `docs/support.md` from the lists of the tests and the registry of drafters.

    python tools/support_matrix.py            # writes the tables
    python tools/support_matrix.py --check    # exit status 1 if they are out of date

vLLM is not imported, and no model is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_specblock import drafters  # noqa: F401 - registers the kinds
from vllm_specblock.drafters.registry import DRAFTERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/support.md"
FAMILIES = "tests/targets/results.json"
COMBINATIONS = "tests/engine/runner/test_combinations.py"
CASES = "tests/lib/support/matrix.py"
QUANTISED = "tests/engine/runner/test_quantised_target.py"
FALLBACK = "vllm_specblock/engine/request_drafts.py"
BLOCK = re.compile(r"(<!-- generated .*?-->\n).*(<!-- end -->)", re.DOTALL)


def write_or_check(path: Path, render: Callable[[str], str], doc: str) -> int:
    """Write a page with new tables, or with --check compare it; returns the exit status."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    page = path.read_text(encoding="utf-8")
    if not parser.parse_args().check:
        path.write_text(render(page), encoding="utf-8")
        return 0
    if render(page) == page:
        return 0
    command = f"python tools/{Path(sys.argv[0]).name}"
    print(f"docs/{path.name} is out of date: run {command}", file=sys.stderr)
    return 1


def render(page: str) -> str:
    text = "\n".join([*_targets(), *_fewer_bits(), *_drafters(), *_sampling()])
    return BLOCK.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def _targets() -> Iterator[str]:
    yield from _section("Targets", "with n-gram trees; with SpecBlock and n-gram", "families")
    groups: dict[str, list[str]] = {}
    for name, entry in json.loads((ROOT / FAMILIES).read_text(encoding="utf-8")).items():
        verdicts = [_verdict(entry), _verdict(entry.get("drafter", {}))]
        groups.setdefault("; ".join(dict.fromkeys(filter(None, verdicts))), []).append(name)
    for verdict, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        yield f"| {verdict} | {'; '.join(names)} |"
    yield (
        "\n`make targets` serves tiny models with random weights: float32, on a CPU, six requests "
        "in a batch,\ngreedy and at temperature 0.8, trees of 12 nodes. Other text models are "
        "neither refused nor tested."
    )


def _verdict(entry: dict[str, Any]) -> str:
    verdict, reason = entry.get("verdict", ""), entry.get("reason")
    if reason is None:
        return verdict
    named = re.search("has (.+), which SpecBlock cannot verify", reason)
    if named:
        reason = named[1].split(" (docs/")[0].split(" (model.")[0]
    what = "plain vLLM cannot start on a CPU" if verdict == "cannot start" else verdict
    return what if verdict == "cannot start" else f"{what}: {reason}"


def _fewer_bits() -> Iterator[str]:
    yield from _section("Quantisation", "target", "on a CPU", "on a GPU")
    for name in dictionary_of(QUANTISED, "FORMS"):
        yield f"| {name} | tested in float16, with AVX-512 | not tried |"
    yield (
        "| weights and activations in int8 | runs with a warning: rounding can differ. In float32, "
        "4 of 20 answers differed | not tried |"
    )
    yield "| weights in float8 | vLLM needs AMX tiles; not tried | not tried |"
    yield "| KV cache in e4m3 | tested, with AVX-512 | refused |"


def _drafters() -> Iterator[str]:
    columns = "weights", "`adapt`", "`quantization`", "`calibrate_drafts`", "reuses last block"
    yield from _section("Drafters", "`kind`", *columns)
    for name, kind in DRAFTERS.items():
        if not kind.drafter.startswith("vllm_specblock."):
            continue  # of another package
        keys = kind.options.model_fields
        has = (
            kind.checkpoint is not None,
            kind.adapts,
            "quantization" in keys,
            "calibrate_drafts" in keys,
            not kind.needs_block_drop,
        )
        yield f"| {name} | {' | '.join('yes' if each else 'no' for each in has)} |"
    yield ""
    yield (
        "Last column: a drafter whose cache rows depend on the next token recomputes the last\n"
        "cached block of a prompt. Two drafters reuse it if both do.\n"
    )
    names = "; ".join(("SpecBlock", *dictionary_of(COMBINATIONS, "COMBINATIONS")))
    text = f"Tested in every sampling case below (`{COMBINATIONS}`): {names}."
    yield textwrap.fill(text, 100, break_on_hyphens=False)


def _sampling() -> Iterator[str]:
    yield from _section("Sampling", "verified", "tested cases")
    source = (ROOT / FALLBACK).read_text(encoding="utf-8")
    body = source.partition("def looks_back(")[2].partition("\n\n\n")[0]
    looks_back = set(re.findall(r"\bparams\.(\w+)", body))
    whole, chain = [], []
    for name, given in dictionary_of(CASES, "CASES").items():
        keys = {each.value for each in given.keys} if isinstance(given, ast.Dict) else set()
        (chain if looks_back & keys else whole).append(name)
    keys = ", ".join(f"`{each}`" for each in sorted(looks_back))
    yield f"| the whole tree | {'; '.join(whole)} |"
    yield f"| its best path, as a chain | {'; '.join(chain)}; any of {keys} |"


def _section(title: str, *columns: str) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"


def dictionary_of(path: str, name: str) -> dict[str, ast.expr]:
    """Return a dictionary in a file: the syntax of each key's value."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        if named and isinstance(node.value, ast.Dict):
            return {
                ast.literal_eval(key): value
                for key, value in zip(node.value.keys, node.value.values)
            }
    raise LookupError(f"{path} has no dictionary {name}")


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render, __doc__))
