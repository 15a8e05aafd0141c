"""Attention of trees on a CPU against vLLM's kernel on chains of as many rows.

One layer over the same packed cache, the ways taking turns, in CPU time; vLLM's CPU build.

    python benchmarks/cpu_attention.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from lib.results_store import MEASURED, ResultsStore, markdown_table
from torch import Tensor
from vllm import _custom_ops as ops
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from vllm_specblock.engine.cpu.attention import CpuStep, packed_cache
from vllm_specblock.tree import ancestor_words

GOAL = 1.2
BLOCK = 128  # vLLM's own on a CPU
CONTEXTS, BATCHES = (128, 512, 2048), (1, 4)
CALLS = 3  # in a row
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def queries_of(tables: Tensor, context: int, mask_words: Tensor) -> TreeAttentionBatch:
    """A tree behind `context` entries of each request; words [batch, rows, W]."""
    batch, rows = mask_words.shape[:2]
    start = torch.arange(batch + 1, dtype=torch.int32) * rows
    before = torch.full((batch * rows,), context, dtype=torch.int32)
    length = before[:batch] + rows
    return TreeAttentionBatch(
        tables,
        BLOCK,
        start,
        start.tolist(),
        length,
        length.tolist(),
        before,
        mask_words.flatten(0, 1),
        before[:batch],
    )


def ways(
    dtype: torch.dtype, batch: int, context: int, rows: int, heads: int, kv_heads: int, size: int
) -> dict[str, Callable[[], Tensor]]:
    """One layer: random trees by us, as many rows in chains by vLLM, the trees by torch."""
    blocks = -(-(context + rows) // BLOCK)
    tables = (torch.randperm(batch * blocks) + 1).view(batch, blocks).int()
    shape = batch * blocks + 1, BLOCK, kv_heads, 2 * size
    plain, cache = torch.randn(shape).to(dtype), torch.zeros(shape, dtype=dtype).transpose(1, 2)
    packed = packed_cache(cache, "auto")
    if packed is None:
        raise SystemExit(
            "vLLM packs the caches of this CPU in a way that our kernel does not know."
        )
    key, value = plain.flatten(0, 1).chunk(2, dim=-1)
    slots = torch.arange(len(key))
    ops.cpu_attn_reshape_and_cache(key, value, packed.keys, packed.values, slots, packed.isa)
    query = torch.randn(batch * rows, heads, size).to(dtype)
    parent = (torch.rand(batch, rows - 1) * torch.arange(1, rows)).int()
    tree = queries_of(tables, context, ancestor_words(parent))
    path = torch.arange(rows - 1, dtype=torch.int32).expand(batch, -1)
    chain = CpuStep(queries_of(tables, context, ancestor_words(path)))
    scale, out = size**-0.5, torch.empty_like(query)

    def by_vllm() -> Tensor:
        chain.attend_causal(packed, query, out, scale)
        return out

    return {
        "ours": lambda: tree.attend(query, cache, scale, packing=packed.packing),
        "vLLM, chains": by_vllm,
        "torch": lambda: tree.attend(query, plain.transpose(1, 2), scale),
    }


def take_turns(ways: dict[str, Callable[[], Tensor]], runs: int) -> dict[str, float]:
    """Median microseconds of CPU time of each way, all of them once per run."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):  # the first compiles
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(CALLS):
                way()
            if run:
                took[name].append((time.process_time() - began) / CALLS * 1e6)
    return {name: statistics.median(each) for name, each in took.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    rows = [["dtype, batch, context", *next(iter(results.values())), "ours / vLLM"]]
    for name, found in results.items():
        ratio = found["ours"] / found["vLLM, chains"]
        verdict = f"{ratio:.2f} (goal ≤ {GOAL}: {'met' if ratio <= GOAL else 'missed'})"
        rows.append([name, *(f"{each:.0f}" for each in found.values()), verdict])
    return markdown_table(rows)


def main(
    rows: Annotated[int, typer.Option(min=2, help="A root and its nodes.")] = 16,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 9,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 3,
    size: Annotated[int, typer.Option(help="Head size.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of vLLM's kernel and torch's.")] = 1,
    contexts: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Turns; the median counts.")] = 30,
    out: Annotated[Path, typer.Option(help="JSON.")] = MEASURED / "cpu_attention.json",
) -> None:
    """Time one layer's attention, print microseconds of CPU time, write JSON."""
    torch.set_num_threads(threads)
    settings = {
        "rows": rows,
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "threads": threads,
        "runs": runs,
    }
    store = ResultsStore(out, settings)
    for (name, dtype), batch, context in itertools.product(
        DTYPES.items(), BATCHES, contexts or CONTEXTS
    ):
        case = f"{name}, {batch}, {context}"
        if case not in store:
            with torch.inference_mode():
                made = ways(dtype, batch, context, rows, heads, kv_heads, size)
                store.add(case, take_turns(made, runs))
    print(f"{settings}\n\n{table(store.results)}")


if __name__ == "__main__":
    typer.run(main)
