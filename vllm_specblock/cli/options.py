"""Options that several commands share."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


class Precision(StrEnum):
    """Arithmetic of target and drafter."""

    FP32 = "fp32"
    BF16 = "bf16"


def three_layers(text: str) -> tuple[int, int, int]:
    """Parse "2,16,29"."""
    try:
        low, mid, high = (int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not three layer numbers with commas between them, such as 2,16,29."
        ) from None
    return low, mid, high


def four_widths(text: str) -> list[int]:
    """Parse "2,4,6,4"."""
    widths = text.split(",")
    if len(widths) != 4 or not all(width.strip().isdigit() for width in widths):
        raise typer.BadParameter(
            f"{text!r} is not four numbers with commas between them, such as 2,4,6,4."
        )
    return [int(width) for width in widths]


def json_object(text: str) -> dict[str, Any]:
    """Parse '{"name": value}'."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{text!r} is not a JSON object, such as {{"name": 1}}.')
    return value


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

TargetName = Annotated[
    str | None,
    typer.Option(help="What vLLM loads as the target, folder or hub id. Default: --target."),
]

DrafterDir = Annotated[
    Path, typer.Argument(help="Drafter, in either layout: a folder or a hub id.")
]

TargetDir = Annotated[
    Path | None,
    typer.Option(help="Folder or hub id of the target. Default: as the drafter names it."),
]

OutDir = Annotated[Path, typer.Option(help="Directory to write the drafter to.")]

UpdateRate = Annotated[
    float | None,
    typer.Option(
        min=0, help="Constant rate; heads: 3 times it. Default: 0.0576 / the drafter's width."
    ),
]
