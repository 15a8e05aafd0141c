"""`specblock convert`: from the published checkpoint layout to ours, and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_specblock.cli.options import DrafterDir, LayerIds, OutDir, TargetName


class To(StrEnum):
    """Layouts to convert to."""

    OURS = "ours"
    PUBLISHED = "published"


def convert(
    source: DrafterDir,
    out: OutDir,
    to: Annotated[To, typer.Option(help="Layout to write.")] = To.OURS,
    target: Annotated[
        Path | None,
        typer.Option(
            help="Folder or hub id of the target, to write down its name and feature layers."
        ),
    ] = None,
    target_name: TargetName = None,
    layer_ids: LayerIds = None,
) -> None:
    """Rewrite a drafter directory in the other layout; the weights keep their bits."""
    from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
    from vllm_specblock.drafters.specblock import checkpoint

    folder = drafter_folder(source)
    if target is not None:
        target_name, target = target_name or str(target), target_folder(target)
    checkpoint.convert(folder, out, to.value, target, target_name, layer_ids)
    typer.echo(f"Wrote {source} in the layout '{to.value}' to {out}")
