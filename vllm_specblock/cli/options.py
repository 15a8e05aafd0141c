"""Command-line options: shared ones, and those made from the fields of a pydantic model."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_specblock.train.config import parse, read_recipe


def three_layers(text: str) -> tuple[int, ...]:
    """Parse "2,16,29"."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is not 3 integers, such as 2,16,29.")
    return tuple(map(int, parts))


def json_object(text: str) -> dict[str, Any]:
    """Parse '{"name": value}'."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{text!r} is not a JSON object, such as {{"name": 1}}.')
    return value


def json_option(help: str) -> Any:
    """Return an option that takes a JSON object."""
    return typer.Option(parser=json_object, metavar="JSON", help=help)


Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Apply the target's chat template to prompts, or not. Default: --chat if there is a "
        "template.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
DrafterDir = Annotated[Path, typer.Argument(help="Drafter: a folder in any layout, or a hub id.")]
NewTokens = Annotated[
    int, typer.Option(min=1, help="Tokens that the target generates after each prompt.")
]
OutDir = Annotated[Path, typer.Option(help="Directory to write the drafter to.")]
Precision = Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of target and drafter.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of a `text` that are its prompt.")]
RequiredTarget = Annotated[Path, typer.Option(help="Folder or hub id of the target model.")]
TargetDir = Annotated[
    Path | None,
    typer.Option(help="Folder or hub id of the target. Default: as named in the drafter."),
]
TreeNodes = Annotated[
    int | None, typer.Option(min=1, max=256, help="Nodes of a tree. Default: as in serving.")
]
UpdateRate = Annotated[
    float | None,
    typer.Option(
        min=0, help="Constant rate; heads: 3 times it. Default: 0.0576 / the drafter's width."
    ),
]

_RECIPE = Annotated[
    Path | None, typer.Argument(help="YAML file of options; those on the command line win.")
]


def options_of(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that it takes a recipe and `model`'s fields as options.

    The command's first parameter gets the parsed `model`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        fields = [_option(name, field) for name, field in model.model_fields.items()]

        def run(recipe: Path | None, **arguments: Any) -> None:
            of_command = {parameter.name: arguments.pop(parameter.name) for parameter in own}
            # A repeatable option that is not set comes as an empty list.
            unset: tuple[Any, ...] = (None, [], ())
            given = {name: value for name, value in arguments.items() if value not in unset}
            command(parse(model, **(read_recipe(recipe) if recipe else {}) | given), **of_command)

        first = _parameter("recipe", _RECIPE)
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (first, *own, *fields)]
        described: Any = run
        described.__signature__ = inspect.Signature(parameters)
        described.__annotations__ = {p.name: p.annotation for p in parameters}
        described.__name__, described.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, how = _kind(field.annotation)
    default = None if field.is_required() else field.default
    shown: str | bool = False if default is None else str(default)
    if isinstance(default, tuple | dict):
        shown = ", ".join(map(str, default)) or False
    elif isinstance(default, bool):
        shown = f"{'' if default else 'no-'}{name.replace('_', '-')}"
    option = typer.Option(help=field.description, show_default=shown, **how)
    return _parameter(name, Annotated[kind | None, option])


def _kind(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """Return the type that typer parses a field's values as, and typer's other arguments."""
    parts = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if len(parts) > 1:  # a number or a word: pydantic decides which
        words = [w for part in parts if typing.get_origin(part) is Literal for w in part.__args__]
        return str, {"metavar": "|".join(["N", *words])}
    (kind,), origin, inside = parts, typing.get_origin(parts[0]), typing.get_args(parts[0])
    if origin is tuple and inside[-1] is Ellipsis:  # repeatable
        one = typing.get_args(inside[0])[0] if hasattr(inside[0], "__metadata__") else inside[0]
        return types.GenericAlias(list, one), {}
    if origin is tuple:
        return str, {"parser": three_layers, "metavar": "LOW,MID,HIGH"}
    if origin is dict and inside[1] is Path:
        return list[str], {"metavar": "NAME=PATH"}
    if origin is dict:
        return dict, {"parser": json_object, "metavar": "JSON"}
    assert origin is Literal or kind in (int, float, bool, str, Path), f"no option for {annotation}"
    return kind, {}
