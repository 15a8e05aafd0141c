"""`specblock data`: training shards from chat data, or from what the target makes up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_specblock.cli.options import json_object

if TYPE_CHECKING:
    from vllm_specblock.engine.offline.generate import VllmAnswerer


def data(
    target: Annotated[Path, typer.Option(help="Folder or hub id of the target model.")],
    out: Annotated[Path, typer.Option(help="Folder to write the shards to.")],
    input: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .jsonl or .jsonl.gz file: conversations (ShareGPT), messages or data "
            "(UltraChat), a prompt or a text in each line. May be given several times."
        ),
    ] = None,
    self_prompts: Annotated[
        int,
        typer.Option(
            help="Prompts that the target makes up itself, beside those of --input or instead of "
            "them: it goes on where its chat template begins a user's turn."
        ),
    ] = 0,
    answers: Annotated[
        str, typer.Option(help="regenerate: the target writes them; keep: those of the data.")
    ] = "regenerate",
    raw_prompts: Annotated[
        bool, typer.Option("--raw-prompts", help="Prompts are text to go on with, not a chat's.")
    ] = False,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="0 is greedy. Given several times, conversations take turns. Default: 0"),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampled answers.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of one answer.")] = 1024,
    max_length: Annotated[
        int,
        typer.Option(help="Tokens of a sequence. Chats end there, texts go on in a new sequence."),
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Seeds the sampling.")] = 0,
    limit: Annotated[
        int | None, typer.Option(help="Take this many usable lines of the input.")
    ] = None,
    shard_size: Annotated[
        int, typer.Option(help="Lines of a shard: what a killed run loses at most.")
    ] = 512,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Most frequent tokens whose coverage is printed at the end.")
    ] = 32000,
    template_options: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json_object,
            metavar="JSON",
            help="""Variables of the chat template, such as '{"enable_thinking": false}'.""",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the target's arithmetic, as in vLLM.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the target.")] = 1,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU that vLLM takes. Default: vLLM's.")
    ] = None,
    engine: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json_object,
            metavar="JSON",
            help="""Further arguments of vLLM's LLM, such as '{"max_num_seqs": 512}'.""",
        ),
    ] = None,
) -> None:
    """Make training shards from chat data or from nothing, with answers by the target in vLLM.

    Killed and started again with the same options, it goes on where it was.
    """
    # Here and not above: torch and transformers take seconds, `--help` should not.
    from vllm_specblock.drafters.common.hub import target_folder
    from vllm_specblock.train.config import parse
    from vllm_specblock.train.data.make_data import coverage, make_data
    from vllm_specblock.train.data.options import DataOptions

    options = parse(
        DataOptions,
        target=target_folder(target),
        input=tuple(input or ()),
        self_prompts=self_prompts,
        out=out,
        answers=answers,
        raw_prompts=raw_prompts,
        temperature=tuple(temperature or [0.0]),
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        seed=seed,
        limit=limit,
        shard_size=shard_size,
        draft_vocab_size=draft_vocab_size,
        template_options=template_options or {},
        dtype=dtype,
        engine=_engine(tensor_parallel_size, gpu_memory_utilization, engine),
    )

    def load() -> VllmAnswerer:
        from vllm_specblock.engine.offline.generate import VllmAnswerer

        return VllmAnswerer(
            options.target,
            max_length=options.max_length,
            dtype=options.dtype,
            top_p=options.top_p,
            seed=options.seed,
            engine=options.engine,
        )

    made = make_data(options, load)
    index = made.index
    typer.echo(
        f"{index['sequences']:,} sequences of {index['tokens']:,} tokens, {index['counted']:,} of "
        f"them counted, are in {out}."
    )
    typer.echo(f"{index['skipped']:,} lines were skipped.")
    if index["cut"]:
        typer.echo(
            f"{index['cut']:,} conversations end before their last turn: the chat template writes "
            "their past otherwise than it happened."
        )
    size = min(draft_vocab_size, index["vocab_size"])
    typer.echo(
        f"draft vocabulary: {size:,} of {index['vocab_size']:,} tokens cover "
        f"{100 * coverage(made.counts, size):.1f} % of the counted tokens"
    )


def _engine(
    tensor_parallel_size: int, gpu_memory_utilization: float | None, more: dict[str, Any] | None
) -> dict[str, Any]:
    engine: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size}
    if gpu_memory_utilization is not None:
        engine["gpu_memory_utilization"] = gpu_memory_utilization
    return engine | (more or {})
