"""`specblock train`: the command line of the trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_specblock.cli.options import options_of
from vllm_specblock.train.config import TrainConfig


@options_of(TrainConfig)
def train(
    config: TrainConfig,
    resume: Annotated[bool, typer.Option(help="Resume from the state in --out, if any.")] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, and write an untrained drafter."),
    ] = False,
) -> None:
    """Train a SpecBlock drafter for a frozen target.

    The drafter in --out is what vLLM loads; the state to resume from lies in OUT/training. On
    several GPUs: torchrun --nproc-per-node N -m vllm_specblock train RECIPE.
    """
    from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
    from vllm_specblock.train.run import train as run

    config = config.model_copy(
        update={
            "target": target_folder(config.target),
            "target_name": config.target_name or str(config.target),
            "init": config.init and drafter_folder(config.init),
        }
    )
    run(config, resume=resume, dry_run=dry_run)
