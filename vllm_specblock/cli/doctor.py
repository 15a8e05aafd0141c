"""`specblock doctor`: what keeps an engine from drafting, or would."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def doctor(
    target: Annotated[
        str | None, typer.Option(help="A target to look at, a folder or a hub id.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A drafter, held against --target: a folder or a hub id."),
    ] = None,
) -> None:
    """Look at versions, at vLLM's hooks and at kernels; with --target and --model at these, too.

    Says what an engine would refuse, in its words, and what to do. Exit status 1 if anything is
    wrong. No weights of the target are loaded.
    """
    # Read when vLLM is imported: what it says beside is not asked for here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_specblock.cli.report.doctor_table import print_findings
    from vllm_specblock.engine.doctor.examine import examine

    if print_findings(examine(target, model)):
        raise typer.Exit(1)
