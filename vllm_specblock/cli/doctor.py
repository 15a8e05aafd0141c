"""`specblock doctor`: checks for problems that prevent drafting."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from vllm_specblock.cli.options import json_option

SpeculativeConfig = Annotated[
    dict[str, Any] | None,
    json_option("Instead of --model, the JSON for `vllm serve`: two drafters, n-grams, options."),
]

MARKS = {"right": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


def chosen_drafter(model: str | None, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the `speculative_config` of one of two options, its keys without dashes, or None."""
    if model is not None and config is not None:
        raise typer.BadParameter("--model and --speculative-config are both given: drop one.")
    given = config if model is None else {"model": model}
    return given and {key.replace("-", "_"): value for key, value in given.items()}


def doctor(
    target: Annotated[str | None, typer.Option(help="A target, a folder or a hub id.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A drafter for --target: a folder or a hub id.")
    ] = None,
    speculative_config: SpeculativeConfig = None,
) -> None:
    """Check versions, vLLM's hooks, kernels and, if given, a target and a drafter.

    Prints what an engine would refuse and what to do. Exit status 1 if anything is wrong. No
    weights are loaded.
    """
    given = chosen_drafter(model, speculative_config)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    from vllm_specblock.engine.doctor import examine

    count = 0
    for finding in examine(target, given):
        mark, colour = MARKS[finding.verdict]
        typer.secho(mark, fg=colour, nl=False)
        typer.echo(f" {finding.name:24} {finding.found}")
        if finding.advice:
            typer.secho(f"{'':27}{finding.advice}", fg=colour)
        count += finding.verdict == "wrong"
    typer.echo(f"\n{count} wrong." if count else "\nNothing is wrong.")
    if count:
        raise typer.Exit(1)
