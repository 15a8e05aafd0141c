"""`specblock doctor`: what keeps an engine from drafting, or would."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_specblock.cli.options import json_object

if TYPE_CHECKING:
    SpeculativeConfig = dict[str, Any] | None
else:
    SpeculativeConfig = Annotated[
        str | None,
        typer.Option(
            parser=json_object,
            metavar="JSON",
            help="In place of --model, the JSON for `vllm serve`: two drafters, n-grams, options.",
        ),
    ]

MARKS = {"right": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


def chosen_drafter(model: str | None, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the `speculative_config` of one of two options, or None."""
    if model is not None and config is not None:
        raise typer.BadParameter("--model and --speculative-config are both given: drop one.")
    return config if model is None else {"model": model}


def doctor(
    target: Annotated[str | None, typer.Option(help="A target, a folder or a hub id.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A drafter for --target: a folder or a hub id.")
    ] = None,
    speculative_config: SpeculativeConfig = None,
) -> None:
    """Check versions, vLLM's hooks and kernels; with --target and --model these, too.

    Prints what an engine would refuse and what to do. Exit status 1 if anything is wrong. The
    target's weights are not loaded.
    """
    given = chosen_drafter(model, speculative_config)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    from vllm_specblock.engine.doctor.examine import examine

    if print_findings(examine(target, given)):
        raise typer.Exit(1)


def print_findings(findings: Iterable[Any]) -> int:
    """Print a line per `Finding`, advice below it; return how many are wrong."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    count = 0
    for finding in findings:
        mark, colour = MARKS[finding.verdict]
        count += finding.verdict == "wrong"
        said = Text(finding.found)
        if finding.advice:
            said.append(f"\n{finding.advice}", style=colour)
        table.add_row(Text(mark, style=colour), Text(finding.name), said)
    # In a pipe rich takes 80 columns, which would break sentences.
    console.width = max(console.width, 1000 if not console.is_terminal else 0)
    console.print(table)
    console.print("Nothing is wrong." if not count else f"{count} wrong.", markup=False)
    return count
