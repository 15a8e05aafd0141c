"""`specblock init` and `specblock convert`: write a drafter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_specblock.cli.options import DrafterDir, LayerIds, OutDir, RequiredTarget, TargetName


def init(
    target: RequiredTarget,
    out: OutDir,
    block_size: Annotated[int, typer.Option(help="K, draft positions per forward.")] = 4,
    layers: Annotated[int, typer.Option(help="L, decoder layers of the drafter.")] = 2,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens the drafter can name. Default: 32000 or, if fewer, all."),
    ] = None,
    layer_ids: LayerIds = None,
    target_name: TargetName = None,
    qk_norm: Annotated[
        bool | None, typer.Option(help="RMS norm on queries and keys. Default: as the target.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Make an untrained drafter, shaped after a Llama- or Qwen3-like target.

    It drafts from the first --draft-vocab-size token ids. `specblock train` without --init makes
    its own, which drafts from the most frequent ones of its data.
    """
    from vllm_specblock.drafters.common.hub import target_folder
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train import untrained

    drafter = untrained.init(
        target_folder(target),
        block_size=block_size,
        num_layers=layers,
        draft_vocab_size=draft_vocab_size,
        layer_ids=layer_ids,
        target_name=target_name or str(target),
        qk_norm=qk_norm,
        seed=seed,
    )
    checkpoint.save(drafter, out)
    millions = sum(weight.numel() for weight in drafter.parameters()) / 1e6
    typer.echo(f"Wrote an untrained drafter of {millions:.1f} M parameters to {out}")


def convert(
    source: DrafterDir,
    out: OutDir,
    to: Annotated[Literal["ours", "published"], typer.Option(help="Layout to write.")] = "ours",
    target: Annotated[
        Path | None,
        typer.Option(help="Folder or hub id of the target; its name and layers are written down."),
    ] = None,
    target_name: TargetName = None,
    layer_ids: LayerIds = None,
) -> None:
    """Rewrite a drafter directory in the other layout; the weights keep their bits."""
    from vllm_specblock.drafters.common.config import CheckpointError
    from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
    from vllm_specblock.drafters.specblock import checkpoint
    from vllm_specblock.train.target.target_info import check_target, describe_target

    folder, info = drafter_folder(source), None
    if target is not None:
        made_for, directory = checkpoint.read_config(folder).target, target_folder(target)
        layers = layer_ids or made_for.layer_ids
        info = describe_target(directory, target_name or str(target), layers)
        check_target(folder, made_for, directory, info)
    elif target_name is not None or layer_ids is not None:
        raise CheckpointError("The target's name and layers were given without --target.")
    checkpoint.convert(folder, out, to, info)
    typer.echo(f"Wrote {source} in the layout '{to}' to {out}")
