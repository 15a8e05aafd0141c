"""Command-line options made from the fields of a pydantic model: one place for each option."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_specblock.cli.options import json_object, three_layers

Command = Callable[..., None]


def options_of(model: type[BaseModel]) -> Callable[[Command], Command]:
    """Decorate a command so that it takes `model`'s fields as options.

    The command's last parameter must be `**given`: it gets those that the user wrote, by name.
    """

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        fields = [_option(name, field) for name, field in model.model_fields.items()]

        def run(**arguments: Any) -> None:
            names = {parameter.name for parameter in own}
            # An option that may be repeated and is not there comes as an empty list.
            given = {
                k: v for k, v in arguments.items() if k not in names and v not in (None, [], ())
            }
            command(**{k: v for k, v in arguments.items() if k in names}, **given)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *fields)]
        described: Any = run
        described.__signature__ = inspect.Signature(parameters)
        described.__annotations__ = {p.name: p.annotation for p in parameters}
        described.__name__, described.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, how = _kind(field.annotation)
    default = field.default if not field.is_required() and field.default is not None else None
    shown: str | bool = str(default) if default is not None else False
    if isinstance(default, tuple | dict):
        shown = ", ".join(map(str, default)) or False
    if isinstance(default, bool):
        shown = f"{'' if default else 'no-'}{name.replace('_', '-')}"
    option = typer.Option(help=field.description, show_default=shown, **how)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # made as it runs
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _kind(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """The type that typer parses a field's values as, and what else it must be told."""
    parts = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if len(parts) > 1:  # a number or a word: pydantic tells which
        words = [w for part in parts if typing.get_origin(part) is Literal for w in part.__args__]
        return str, {"metavar": "|".join(["N", *words])}
    if typing.get_origin(parts[0]) is Literal:
        return parts[0], {}
    inside = typing.get_args(parts[0])
    if typing.get_origin(parts[0]) is tuple and inside[-1] is Ellipsis:
        return types.GenericAlias(list, _bare(inside[0])), {}  # repeatable
    if typing.get_origin(parts[0]) is tuple:
        return str, {"parser": three_layers, "metavar": "LOW,MID,HIGH"}
    if typing.get_origin(parts[0]) is dict and inside[1] is Path:
        return list[str], {"metavar": "NAME=PATH"}
    if typing.get_origin(parts[0]) is dict:
        return dict, {"parser": json_object, "metavar": "JSON"}
    assert parts[0] in (int, float, bool, str, Path), f"no option for {annotation}"
    return parts[0], {}


def _bare(annotation: Any) -> Any:
    """Without what pydantic is told besides."""
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
