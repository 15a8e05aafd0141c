"""`specblock init` and `specblock convert`: write a drafter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_specblock.cli.options import DrafterDir, OutDir, RequiredTarget


def init(target: RequiredTarget, out: OutDir) -> None:
    """Make an untrained drafter, shaped after a Llama or Qwen3 target.

    Its draft vocabulary is the first 32,000 token ids. `specblock train` needs no such drafter: it
    makes its own, whose draft vocabulary is the most frequent ids of the data.
    """
    from vllm_specblock.drafters.common.hub import target_folder
    from vllm_specblock.train import saving, untrained

    drafter = untrained.init(target_folder(target), target_name=str(target))
    saving.save(drafter, out)
    millions = sum(weight.numel() for weight in drafter.parameters()) / 1e6
    typer.echo(f"Wrote an untrained drafter of {millions:.1f} M parameters to {out}")


def convert(
    source: DrafterDir,
    out: OutDir,
    to: Annotated[Literal["ours", "published"], typer.Option(help="Layout to write.")] = "ours",
    target: Annotated[
        Path | None,
        typer.Option(help="Folder or hub id of the target; its name and layers are added."),
    ] = None,
) -> None:
    """Rewrite a drafter directory in the other layout; the weights keep their bits."""
    from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train import saving
    from vllm_specblock.train.target.target_info import check_target, describe_target

    folder, info = drafter_folder(source), None
    if target is not None:
        made_for, directory = checkpoint.read_config(folder).target, target_folder(target)
        info = describe_target(directory, str(target), made_for.layer_ids)
        check_target(folder, made_for, directory, info)
    saving.convert(folder, out, to, info)
    typer.echo(f"Wrote {source} in the layout '{to}' to {out}")
