"""`specblock chat`: your own prompts with and without draft trees, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_specblock.cli.doctor import SpeculativeConfig, chosen_drafter


def chat(
    target: Annotated[
        str, typer.Argument(help="Target, a folder or a hub id, or a server: http://HOST:PORT.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Drafter, a folder or a hub id. Default: n-gram lookup.")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Dtype of the target, as in vLLM.")] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Compile neither engine.")] = False,
) -> None:
    """Chat with vLLM and with vLLM with draft trees, side by side.

    Accepted draft tokens are tinted. Below the answers are tokens/s and τ, the tokens per decode
    step. A server answers twice, without and with drafts, and reports τ only with
    --per-request-spec-decode-metrics summary. A pipe may give the prompts, one per line.
    """
    given = chosen_drafter(model, speculative_config)
    import httpx
    import openai
    from rich.console import Console

    from vllm_specblock.bench.process import end_all
    from vllm_specblock.cli.chat_sources import EngineSource, ServerSource, talk
    from vllm_specblock.train.config import TrainError

    console = Console(highlight=False)
    if target.startswith(("http://", "https://")):
        if given is not None:
            raise typer.BadParameter("A server has its own drafter: drop --model and its JSON.")
        try:
            return talk(console, ServerSource(target.rstrip("/"), max_tokens, temperature))
        except (openai.OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise TrainError(f"The server at {target} gave no answer: {error}") from None
    speculative = {"method": "specblock"} | (given or {"kind": "ngram"})
    source = EngineSource(target, speculative, max_tokens, temperature)
    console.print("Starting vLLM; the first time it compiles the model.", style="dim")
    try:
        source.start(dtype, eager)
        talk(console, source)
    finally:
        end_all(source.engines)
