"""Compare 100,000 tokens with and without SpecBlock: the output must not change.

    python benchmarks/exactness.py [--tokens 100000]

Batches of eight requests of different length and temperature, on held-out prompts of the example
pair, through two engines in one process, in float32. Exits with 1 on the first difference.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# In one process, a second thread of torch only spins beside vLLM's own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import typer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "examples/tiny_pair"
sys.path.insert(0, str(PAIR))

TEMPERATURES = (0.0, 0.7, 1.0, 0.0)


def main(
    tokens: Annotated[int, typer.Option(help="Tokens to compare, at least.")] = 100_000,
    nodes: Annotated[int, typer.Option(help="Nodes of the draft tree.")] = 24,
) -> None:
    """Generate the same requests twice and compare every token."""
    import corpus
    from vllm import LLM, SamplingParams

    def engine(speculative: dict | None) -> LLM:
        return LLM(
            model=str(PAIR / "target"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            kv_cache_memory_bytes=256 << 20,
            distributed_executor_backend="uni",
            speculative_config=speculative,
        )

    plain = engine(None)
    tree = engine(
        {
            "method": "specblock",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": nodes,
        }
    )
    held_out = corpus.load().held_out
    texts = [p for size in (400, 150, 800) for p in corpus.prompts(held_out, 40, size)]
    compared, batch, began = 0, 0, time.monotonic()
    with tqdm(total=tokens, unit="token") as bar:
        while compared < tokens:
            prompts = [texts[(8 * batch + i) % len(texts)] for i in range(8)]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[i % 4],
                    top_p=0.9 if i % 3 == 0 else 1.0,
                    seed=8 * batch + i,
                    max_tokens=100 + 40 * i,
                    ignore_eos=True,
                )
                for i in range(8)
            ]
            ours = tree.generate(prompts, params, use_tqdm=False)
            theirs = plain.generate(prompts, params, use_tqdm=False)
            for mine, other in zip(ours, theirs):
                if mine.outputs[0].token_ids != other.outputs[0].token_ids:
                    print(f"different: batch {batch}, prompt {mine.prompt!r}")
                    raise typer.Exit(1)
                compared += len(mine.outputs[0].token_ids)
                bar.update(len(mine.outputs[0].token_ids))
            batch += 1
    seconds = time.monotonic() - began
    print(f"{compared} tokens compared in {seconds:.0f} s, 0 different (float32, batch 8)")


if __name__ == "__main__":
    typer.run(main)
