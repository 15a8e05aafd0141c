"""Write the generated parts of `docs/support.md` and `docs/options.md`.

    python tools/pages.py

They come from the lists of the tests, the registry of drafters and the models of the options. vLLM
is not imported, and no model is run.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_specblock import drafters  # noqa: F401 - registers the kinds
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.registry import DRAFTERS, WeightedOptions

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = "tests/targets/results.json"
COMBINATIONS = "tests/engine/runner/test_combinations.py"
CASES = "tests/lib/support/matrix.py"
QUANTISED = "tests/engine/runner/test_quantised_target.py"
FALLBACK = "vllm_specblock/engine/request_drafts.py"
BLOCK = re.compile(r"(<!-- generated .*?-->\n).*(<!-- end -->)", re.DOTALL)
OURS = {name: kind for name, kind in DRAFTERS.items() if kind.drafter.startswith("vllm_specblock.")}


def render(name: str, page: str) -> str:
    """Return a page with its generated part anew; name: one of `PAGES`."""
    text = "\n".join(PAGES[name]())
    return BLOCK.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def support() -> Iterator[str]:
    yield from (*_targets(), *_fewer_bits(), *_drafters(), *_sampling())


def options() -> Iterator[str]:
    shared, kinds = set(WeightedOptions.model_fields), {}
    for name, kind in OURS.items():
        kinds.setdefault(kind.options, []).append(f"`{name}`")
    models = {
        WeightedOptions: ["Every drafter with weights"],
        **kinds,
        CombineConfig: ["Two drafters"],
        AdaptConfig: ["`adapt`"],
    }
    begin = ""
    for model, names in models.items():
        yield f"{begin}{', '.join(names)}:\n"
        begin = "\n"
        own = [key for key in model.model_fields if model is WeightedOptions or key not in shared]
        yield from _items(model, own)


PAGES = {"docs/support.md": support, "docs/options.md": options}


def _items(model: type[BaseModel], keys: list[str]) -> Iterator[str]:
    for key in keys:
        default, text = model.model_fields[key].default, model.model_fields[key].description or ""
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        values = _values(model.model_json_schema()["properties"][key])
        facts = "; ".join(filter(None, [values, "" if default is None else f"default `{shown}`"]))
        item = f"- `{key}`{f' ({facts})' if facts else ''}: {' '.join(text.split())}"
        yield textwrap.fill(item, 100, subsequent_indent="  ", break_on_hyphens=False)


def _values(schema: dict[str, Any]) -> str:
    """Return the words, or the range of the numbers, that a field takes."""
    found = []
    for each in schema.get("anyOf", [schema]):
        each = each | each.get("items", {})
        found += [
            f"`{word}`" for word in each.get("enum", [each["const"]] if "const" in each else [])
        ]
        found += ["true, false"] if each.get("type") == "boolean" else []
        if "maximum" in each:
            found.append(f"{each.get('minimum', '')} to {each['maximum']}")
        elif "minimum" in each:
            found.append(f"at least {each['minimum']}")
        if "exclusiveMinimum" in each:
            found.append(f"above {each['exclusiveMinimum']}")
    return ", ".join(found)


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
    if verdict == "cannot start":
        return "plain vLLM cannot start on a CPU"
    if reason is None:
        return verdict
    named = re.search("has (.+), which SpecBlock cannot verify", reason)
    shown = re.sub(r"model\.\S+, ", "", named[1]) if named else reason
    return f"{verdict}: {shown}"


def _fewer_bits() -> Iterator[str]:
    yield from _section("Quantisation", "target", "on a CPU", "on a GPU")
    for name in dictionary_of(QUANTISED, "FORMS"):
        yield f"| {name} | tested in float16, with AVX-512 | not tried |"
    yield (
        "| weights and activations in int8 | runs with a warning: rounding can differ. In float32, "
        "4 of 20 answers differed | not tried |"
    )
    yield "| weights in float8 | vLLM needs AMX tiles; not tried | not tried |"
    yield "| KV cache in e4m3 | tested, with AVX-512 | Hopper only, tested on the emulated GPU |"


def _drafters() -> Iterator[str]:
    columns = "weights", "`adapt`", "`quantization`", "`calibrate_drafts`", "reuses last block"
    yield from _section("Drafters", "`kind`", *columns)
    for name, kind in OURS.items():
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
    keys = ", ".join(f"`{each}`" for each in sorted(looks_back)) + "; custom logits processors"
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
    for name in PAGES:
        path = ROOT / name
        path.write_text(render(name, path.read_text(encoding="utf-8")), encoding="utf-8")
