"""Write the lists of `docs/options.md` from the pydantic models of the options.

python tools/options_page.py            # writes the page
python tools/options_page.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from support_matrix import BLOCK, ROOT, write_or_check

from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.registry import DRAFTERS, WeightedOptions

PAGE = ROOT / "docs/options.md"


def render(page: str) -> str:
    names: dict[type[BaseModel], list[str]] = {}
    for name, kind in DRAFTERS.items():
        if kind.drafter.startswith("vllm_specblock."):
            names.setdefault(kind.options, []).append(f"`{name}`")
    kinds = {", ".join(each): options for options, each in names.items()}
    models = {
        "Every drafter with weights": WeightedOptions,
        **kinds,
        "Two drafters": CombineConfig,
        "`adapt`": AdaptConfig,
    }
    lines = []
    shared = set(WeightedOptions.model_fields)
    for title, model in models.items():
        own = [key for key in model.model_fields if model is WeightedOptions or key not in shared]
        lines += [f"{title}:", "", *_items(model, own), ""]
    text = "\n".join(lines[:-1])
    return BLOCK.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


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


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render, __doc__))
