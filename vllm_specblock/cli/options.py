"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer


def three_layers(text: str) -> tuple[int, ...]:
    """Parse "2,16,29"."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(
            f"{text!r} is not 3 integers with commas between them, such as 2,16,29."
        )
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


if TYPE_CHECKING:
    LayerIds = tuple[int, int, int] | None
else:  # typer would take a tuple for three arguments
    LayerIds = Annotated[
        str | None,
        typer.Option(
            parser=three_layers,
            metavar="LOW,MID,HIGH",
            help="Target layers whose states the drafter reads; i is the state after i layers. "
            "Default: 2, N//2, N-3 of N.",
        ),
    ]

Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put prompts through the target's chat template, or not. Default: --chat where there "
        "is a template.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
DrafterDir = Annotated[Path, typer.Argument(help="Drafter: a folder in any layout, or a hub id.")]
NewTokens = Annotated[
    int, typer.Option(min=1, help="Tokens that the target generates after each prompt.")
]
OutDir = Annotated[Path, typer.Option(help="Directory to write the drafter to.")]
Precision = Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of target and drafter.")]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="Length of the prompt that is cut from a text without one.")
]
RequiredTarget = Annotated[Path, typer.Option(help="Folder or hub id of the target model.")]
TargetDir = Annotated[
    Path | None,
    typer.Option(help="Folder or hub id of the target. Default: as the drafter names it."),
]
TargetName = Annotated[
    str | None,
    typer.Option(help="What vLLM loads as the target, folder or hub id. Default: --target."),
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
