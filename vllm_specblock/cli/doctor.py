"""`specblock doctor`: what keeps an engine from drafting, or would."""

from __future__ import annotations

import os
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
            help="In place of --model, what `vllm serve` would be given: two drafters, n-grams, "
            "options.",
        ),
    ]


def doctor(
    target: Annotated[
        str | None, typer.Option(help="A target to look at, a folder or a hub id.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A drafter, held against --target: a folder or a hub id."),
    ] = None,
    speculative_config: SpeculativeConfig = None,
) -> None:
    """Look at versions, at vLLM's hooks and at kernels; with --target and --model at these, too.

    Says what an engine would refuse, in its words, and what to do. Exit status 1 if anything is
    wrong. No weights of the target are loaded.
    """
    if model is not None and speculative_config is not None:
        raise typer.BadParameter("--model and --speculative-config are both given: drop one.")
    given = {"model": model} if model is not None else speculative_config
    # Read when vLLM is imported: what it says beside is not asked for here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_specblock.cli.report.doctor_table import print_findings
    from vllm_specblock.engine.doctor.examine import examine

    if print_findings(examine(target, given)):
        raise typer.Exit(1)
