"""Write `docs/support.md`: what runs together, as tests, registry and refusals say it.

    python tools/support_matrix.py            # writes the page
    python tools/support_matrix.py --check    # exit status 1 if it is out of date

Nothing of vLLM is imported, and no model is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_specblock import drafters  # noqa: E402, F401 - registers the kinds
from vllm_specblock.drafters.registry import DRAFTERS  # noqa: E402
from vllm_specblock.versions import SUPPORTED_VLLM, TESTED_VLLM  # noqa: E402

PAGE = ROOT / "docs/support.md"
FAMILIES = "tests/targets/results.json"
COMBINATIONS = "tests/engine/runner/test_combinations.py"
CASES = "tests/lib/support/matrix.py"
QUANTISED = "tests/engine/runner/test_quantised_target.py"
QUANTISED_CACHE = "tests/engine/attention/test_quantised_cache.py"
REFUSALS = "vllm_specblock/engine/config/validate.py"
OF_ADAPT = "vllm_specblock/adapt/check.py"
FALLBACK = "vllm_specblock/engine/runner/chain_fallback.py"
HEAD = """# What runs together

Written by `python tools/support_matrix.py` from the tests' own lists, the registry of drafters and
the engine's refusals; a test fails when it is out of date. "Tested" means: in float32, on a CPU,
token for token what the same vLLM generates without the plugin. What has run on a GPU
([`gpu_checklist.md`](gpu_checklist.md))."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    page = render()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    print("docs/support.md is out of date: run python tools/support_matrix.py", file=sys.stderr)
    return 1


def render() -> str:
    """The page."""
    parts = [HEAD, *_releases(), *_targets(), *_fewer_bits(), *_drafters(), *_sampling()]
    return "\n".join([*parts, *_refusals()])


def _releases() -> Iterator[str]:
    yield from _section("vLLM", "release", "where engines of it can draft", "tested")
    for minor, where in SUPPORTED_VLLM.items():
        yield f"| {minor}.x | {where} | {TESTED_VLLM[minor]} |"


def _targets() -> Iterator[str]:
    columns = ("vLLM's class", "layers, by cache", "n-gram trees", "SpecBlock and n-gram")
    yield from _section("Targets", "family", *columns)
    for name, entry in json.loads((ROOT / FAMILIES).read_text(encoding="utf-8")).items():
        layers = ", ".join(f"{count} {kind}" for kind, count in entry.get("layers", {}).items())
        verdicts = f"{_verdict(entry)} | {_verdict(entry.get('drafter', {}))}"
        yield f"| {name} | `{entry['class']}` | {layers} | {verdicts} |"
    yield (
        "\nWritten by `make targets`, with tiny models of random weights: float32, on a CPU, six "
        "requests in a batch, greedy and at temperature 0.8, trees of 12 nodes. Shared: so many of "
        "the layers read another layer's cache. Any other text model is neither refused nor tested."
    )


def _verdict(entry: dict[str, Any]) -> str:
    verdict, reason = entry.get("verdict", ""), entry.get("reason")
    if reason is None:
        return verdict
    named = re.search("has (.+), which SpecBlock cannot verify", reason)
    what = "plain vLLM cannot start on a CPU" if verdict == "cannot start" else verdict
    return f"{what}: {_linked(named[1] if named else reason)}"


def _fewer_bits() -> Iterator[str]:
    yield from _section("Fewer bits", "what is kept in them", "on a CPU", "on a GPU")
    for name in keys_of(QUANTISED, "FORMS"):
        yield f"| {name} | tested, in float16, with AVX-512 (`{QUANTISED}`) | not tried |"
    yield (
        "| weights and activations in int8 | verified, an engine warns: activations are rounded, "
        "so the last bit of a sum, which a tree and a chain add up in different orders, can decide "
        "a rounding and then a token. In float32, 4 of 20 answers left plain vLLM's somewhere | "
        "not tried |"
    )
    yield "| weights in float8 | refused without AMX tiles, not tried with them | not tried |"
    yield f"| KV cache in e4m3 | tested, with AVX-512 (`{QUANTISED_CACHE}`) | refused |"


def _drafters() -> Iterator[str]:
    columns = (
        "weights",
        "`adapt`",
        "`quantization`",
        "`calibrate_drafts`",
        "imposed acceptance",
        "reuses the last cached block",
    )
    yield from _section("Drafters", "`kind`", *columns)
    for name, kind in DRAFTERS.items():
        keys = kind.options.model_fields
        has = (
            kind.checkpoint is not None,
            kind.adapts,
            "quantization" in keys,
            "calibrate_drafts" in keys,
            kind.imposes,
            not kind.needs_block_drop,
        )
        yield f"| {name} | {' | '.join('yes' if each else 'no' for each in has)} |"
    yield "\nImposed acceptance is for benchmarks only. `adapt` is for ranks of one machine.\n"
    yield (
        "A drafter with cache rows that depend on the next token recomputes the last cached block "
        "of a\nprompt (`engine/test_prefix_hashes.py`). Two drafters reuse it if both do.\n"
    )
    yield f"Tested over every sampling case below, one or two together (`{COMBINATIONS}`):\n"
    yield from (f"- {name}" for name in ("SpecBlock", *keys_of(COMBINATIONS, "COMBINATIONS")))


def _sampling() -> Iterator[str]:
    yield from _section("Sampling", "case, tested", "what is verified of a tree")
    path = "its best path alone, as a chain"
    looks_back = attributes_of(FALLBACK, "looks_back")
    for name, given in items_of(CASES, "CASES"):
        yield f"| {name} | {path if looks_back & given else 'all of it'} |"
    yield f"\nBest path alone, for any of: {', '.join(f'`{each}`' for each in sorted(looks_back))}."


def _refusals() -> Iterator[str]:
    yield "\n## Refused\n"
    yield "In the engine's words, before any weight is loaded; … stands for what was given.\n"
    for path in (REFUSALS, OF_ADAPT):
        yield from (f"- {_linked(sentence)}" for sentence in sentences_of(path))
    yield ""


def _section(title: str, *columns: str) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"


def _linked(text: str) -> str:
    """A page that a sentence names, as a link from here."""
    return re.sub(r"\(docs/(\w+\.md)\)", r"([why](\1))", text)


# ---- what sources say ----


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _function(path: str, name: str) -> ast.FunctionDef:
    """A function of a file.

    Raises:
        LookupError: it has none of that name.
    """
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"{path} has no function {name}")


def items_of(path: str, name: str) -> list[tuple[str, set[str]]]:
    """A file's dictionary of dictionaries: each key, and the keys that are under it.

    Raises:
        LookupError: the file has no such dictionary.
    """
    for node in _tree(path).body:
        named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        if named and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values)
            return [(ast.literal_eval(key), _keys(value)) for key, value in pairs]
    raise LookupError(f"{path} has no dictionary {name}")


def _keys(node: ast.expr) -> set[str]:
    """Keys that are written out in a dictionary; none of another expression."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def keys_of(path: str, name: str) -> list[str]:
    return [key for key, _ in items_of(path, name)]


def attributes_of(path: str, function: str) -> set[str]:
    """What a function reads of its one argument."""
    found = _function(path, function)
    argument = found.args.args[0].arg
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == argument
    }


def sentences_of(path: str) -> list[str]:
    """The sentences of a file's `OptionError`s, with … for what is put into them.

    Where they are raised for the rows of a table, what stands written in its columns is put in.
    """
    tree = _tree(path)
    inside: dict[ast.AST, dict[str, str]] = {}
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple):
            inside |= dict.fromkeys(ast.walk(loop), _columns(loop))
    return [
        _text(node.exc.args[0], {"key": "speculative_config key 'adapt'"} | inside.get(node, {}))
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) == "OptionError"
    ]


def _columns(loop: ast.For) -> dict[str, str]:
    """Of a loop over a table that is written out: variable → what its column says."""
    names = loop.target.elts if isinstance(loop.target, ast.Tuple) else []
    rows = [row.elts for row in loop.iter.elts if isinstance(row, ast.Tuple)]
    found = {}
    for index, name in enumerate(names):
        column = [row[index] for row in rows]
        if all(isinstance(each, ast.Constant) for each in column):
            found[ast.unparse(name)] = " / ".join(each.value for each in column)
    return found


def _text(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else known.get(ast.unparse(part.value), "…")
            for part in node.values
        )
    return str(ast.literal_eval(node))


if __name__ == "__main__":
    sys.exit(main())
