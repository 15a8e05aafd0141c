"""The example pair in real vLLM, with SpecBlock and without: same tokens, fewer target steps.

    python examples/offline.py [--help]

Both engines run one after the other in this process's children, on the same prompts, one
request at a time. Prompts come from files of the standard library that neither model was
trained on.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

# vLLM's CPU build uses Model Runner V2 only if this is set; on a GPU it is the default.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import typer

from vllm_specblock.engine.metrics.acceptance import acceptance_length
from vllm_specblock.engine.offline.answering import read_counters

PAIR = Path(__file__).resolve().parent / "tiny_pair"
sys.path.insert(0, str(PAIR))


@dataclass
class Run:
    """Results of one engine: generated ids per prompt, seconds, growth of the counters."""

    tokens: list[list[int]]
    texts: list[str]
    seconds: float
    counters: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def tau(self) -> float:
        return acceptance_length(self.counters)


def generate(
    prompts: list[str], sampling: dict, speculative: dict | None, repeat: int, **engine
) -> Run:
    """All prompts, one at a time, `repeat` times; the fastest pass counts."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(PAIR / "target"),
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
        **engine,
    )
    params = [SamplingParams(seed=index, **sampling) for index in range(len(prompts))]
    llm.generate(prompts[:1], params[0], use_tqdm=False)  # first calls allocate and compile
    before, seconds, answers = read_counters(llm.get_metrics()), float("inf"), []
    for _ in range(repeat):
        began = time.perf_counter()
        answers = [
            llm.generate([prompt], each, use_tqdm=False)[0].outputs[0]
            for prompt, each in zip(prompts, params)
        ]
        seconds = min(seconds, time.perf_counter() - began)
    return Run(
        [list(answer.token_ids) for answer in answers],
        [answer.text for answer in answers],
        seconds,
        dict(read_counters(llm.get_metrics()) - before),
    )


def main(
    nodes: Annotated[int, typer.Option(help="Nodes of the draft tree.")] = 12,
    blocks: Annotated[int, typer.Option(help="Drafter forwards per step.")] = 1,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 160,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeat: Annotated[int, typer.Option(help="Passes over the prompts; the best counts.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of both engines.")] = "float32",
    graphs: Annotated[
        bool, typer.Option(help="Compile, and capture CUDA graphs, in both engines.")
    ] = False,
) -> None:
    """Compare vLLM with and without SpecBlock on the example pair."""
    import corpus

    texts = corpus.prompts(corpus.load().held_out, prompts)
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    ours = {
        "method": "specblock",
        "model": str(PAIR / "drafter"),
        "num_speculative_tokens": nodes,
        "num_blocks": blocks,
    }
    engine = {"dtype": dtype, "enforce_eager": not graphs}
    plain = generate(texts, sampling, None, repeat, **engine)
    tree = generate(texts, sampling, ours, repeat, **engine)

    different = sum(a != b for a, b in zip(plain.tokens, tree.tokens))
    count = sum(map(len, tree.tokens))
    print(f"\n--- a held-out file goes on ---\n{texts[0][-200:]}>>>{tree.texts[0][:200]}\n---")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {dtype}, batch 1, T = {temperature}")
    print(f"{len(texts)} prompts, {count} tokens, best of {repeat} passes")
    print(f"{'':22}{'tokens/s':>10}{'τ (tokens per target step)':>30}")
    print(f"{'vLLM':22}{plain.tokens_per_second:>10.1f}{1.0:>30.2f}")
    label = f"vLLM + SpecBlock ({nodes})"
    print(f"{label:22}{tree.tokens_per_second:>10.1f}{tree.tau:>30.2f}")
    print(f"speed-up: {tree.tokens_per_second / plain.tokens_per_second:.2f} x")
    print(f"identical: {'no' if different else 'yes'} ({different} of {len(texts)} differ)")
    raise typer.Exit(1 if different else 0)


if __name__ == "__main__":
    typer.run(main)
