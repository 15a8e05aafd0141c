"""`specblock inspect`: what a drafter directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    directory: Annotated[Path, typer.Argument(help="Drafter directory, in either layout.")],
) -> None:
    """Check a drafter and print its config, tensors, size and vocabulary coverage."""
    from vllm_specblock.draft import checkpoint

    config = checkpoint.read_config(directory)
    tensors = checkpoint.read_tensors(directory, config)
    typer.echo(config.model_dump_json(indent=2))
    width = max(map(len, tensors))
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        typer.echo(f"{name:{width}}  {dtype:8}  {list(tensor.shape)}")
    weights = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    typer.echo(f"parameters: {weights:,}")
    covered, total = config.draft_vocab_size, config.vocab_size
    mapped = tensors["t2d"].nonzero()[:, 0]
    typer.echo(
        f"draft vocabulary: {covered:,} of {total:,} target tokens ({covered / total:.1%}), "
        f"ids {mapped[0]} to {mapped[-1]}"
    )
