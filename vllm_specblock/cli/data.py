"""`specblock data`: training shards from chat data."""

from __future__ import annotations

from typing import Any

import typer

from vllm_specblock.cli.options import options_of
from vllm_specblock.train.config import DataOptions


@options_of(DataOptions)
def data(options: DataOptions) -> None:
    """Make training shards from chat data, with answers by the target in vLLM.

    A killed run resumes with the same options.
    """
    from vllm_specblock.drafters.common.hub import target_folder
    from vllm_specblock.train.data.make_data import coverage, make_data

    options = options.model_copy(update={"target": target_folder(options.target)})

    def load() -> Any:
        from vllm_specblock.engine.offline.target import VllmAnswerer

        shared = {"max_length", "dtype", "top_p", "seed", "engine"}
        return VllmAnswerer(options.target, **options.model_dump(include=shared))

    index, counts = make_data(options, load)
    typer.echo(
        f"{index['sequences']:,} sequences of {index['tokens']:,} tokens, {index['counted']:,} of "
        f"them counted, are in {options.out}."
    )
    typer.echo(f"{index['skipped']:,} lines were skipped.")
    if index["cut"]:
        typer.echo(
            f"{index['cut']:,} conversations end before their last turn: the chat template "
            "rewrites earlier turns."
        )
    size = min(options.draft_vocab_size, index["vocab_size"])
    typer.echo(
        f"draft vocabulary: {size:,} of {index['vocab_size']:,} tokens cover "
        f"{100 * coverage(counts, size):.1f} % of the counted tokens"
    )
