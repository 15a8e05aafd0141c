"""Write the lists of `docs/options.md` from the pydantic models of the options.

python tools/options_page.py            # writes the page
python tools/options_page.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vllm_specblock.adapt.options import AdaptConfig  # noqa: E402
from vllm_specblock.config import CombineConfig  # noqa: E402
from vllm_specblock.drafters.registry import DRAFTERS, WeightedOptions  # noqa: E402

PAGE = ROOT / "docs/options.md"
BLOCK = re.compile(r"(<!-- generated .*?-->\n).*(<!-- end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    page = PAGE.read_text(encoding="utf-8")
    if not parser.parse_args().check:
        PAGE.write_text(render(page), encoding="utf-8")
        return 0
    if render(page) == page:
        return 0
    print("docs/options.md is out of date: run python tools/options_page.py", file=sys.stderr)
    return 1


def render(page: str) -> str:
    """Return the page with new lists."""
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
    docs = {}
    for each in model.__mro__:
        if issubclass(each, BaseModel) and each is not BaseModel:
            docs = _docstrings(each) | docs
    for key in keys:
        field = model.model_fields[key]
        default = "" if field.default is None else f"default `{_json(field.default)}`"
        facts = "; ".join(filter(None, [_values(field), default]))
        text = f"- `{key}`{f' ({facts})' if facts else ''}: {' '.join(docs.get(key, '').split())}"
        yield textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def _docstrings(model: type) -> dict[str, str]:
    """Return the string that follows each field of a class."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    found = {}
    for field, text in zip(cls.body, cls.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(field: FieldInfo) -> str:
    """Return the words, or the range of the numbers, that a field takes."""
    words, numbers, kinds = [], {}, []

    def read(annotation: object) -> None:
        inside = typing.get_args(annotation)
        if typing.get_origin(annotation) is typing.Literal:
            words.extend(f"`{each}`" for each in inside)
        elif inside:
            for each in inside:
                read(each)
        elif annotation is bool:
            kinds.append("true, false")
        elif isinstance(annotation, FieldInfo):
            numbers.update(_range(annotation.metadata))
        elif hasattr(annotation, "__slots__"):
            numbers.update(_range([annotation]))

    read(field.annotation)
    numbers.update(_range(field.metadata))
    ends = f"{numbers.get('ge', '')} to {numbers.get('le', '')}" if "le" in numbers else ""
    least = f"at least {numbers['ge']}" if "ge" in numbers and not ends else ""
    above = f"above {numbers['gt']}" if "gt" in numbers else ""
    return ", ".join(filter(None, [*words, *kinds, ends, least, above]))


def _range(metadata: list[object]) -> dict[str, object]:
    names = ("ge", "le", "gt")
    return {name: getattr(m, name) for m in metadata for name in names if hasattr(m, name)}


if __name__ == "__main__":
    sys.exit(main())
