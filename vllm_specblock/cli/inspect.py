"""`specblock inspect`: what a drafter directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    directory: Annotated[
        Path, typer.Argument(help="Of a SpecBlock drafter in either layout, or of another kind.")
    ],
) -> None:
    """Check a drafter and print its config, tensors, size and vocabulary coverage."""
    import torch

    from vllm_specblock.draft import checkpoint
    from vllm_specblock.draft.baselines import files as baselines
    from vllm_specblock.draft.eagle3 import checkpoint as eagle3

    files = eagle3 if eagle3.is_eagle3(directory) else checkpoint
    if baselines.kind_of(directory) is not None:
        files = baselines
    config = files.read_config(directory)
    tensors = files.read_tensors(directory, config)
    typer.echo(config.model_dump_json(indent=2))
    width = max(map(len, tensors))
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        typer.echo(f"{name:{width}}  {dtype:8}  {list(tensor.shape)}")
    weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    typer.echo(f"parameters: {weights:,}")
    covered, total = config.draft_vocab_size, config.vocab_size
    mapped = torch.arange(covered) + tensors["d2t"]
    typer.echo(
        f"draft vocabulary: {covered:,} of {total:,} target tokens ({covered / total:.1%}), "
        f"ids {mapped[0]} to {mapped[-1]}"
    )
