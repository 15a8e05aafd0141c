"""One forward of a drafter against the time that reading its weights and cache takes at least.

    python benchmarks/drafter_forward.py [--help]

An untrained drafter of a target's size, over a paged cache that holds a context already. The bound
is (weights once + keys and values of the context) / the memory's peak bandwidth. Rows stand in a
chain, whose cost is that of the tree's starts. On a GPU: bf16,
CUDA graph replays, the L2 flushed between two; on a CPU tiny, in float32, without a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from lib.model_configs import MODELS, make_drafter, write_target
from lib.options import numbers
from lib.results_store import MEASURED, ResultsStore, markdown_table
from lib.timing import device_name, peak_bandwidth, time_call
from torch import Tensor
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from vllm_specblock.drafters.common.paged_attention import PagedAttention
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel

BLOCK = 16
"""Tokens in one block of the paged cache."""
WIDTH = 16
"""Candidates per position: the widest of the default branching."""
UNREAD = ("t2d", "d2t", "rotary", "input_layer.position_queries", "input_layer.query_norm")
"""What a forward reads nothing of, or next to nothing: `process_after_loading` has folded the
queries."""
FIRST, LATER = "catch-up and block 1", "later block"


def attention_builder(
    config: DrafterConfig,
    context: int,
    batch: int,
    rows: int,
    keep: bool,
    where: torch.device,
    dtype: torch.dtype,
) -> PagedAttention:
    """What `rows` rows of each of `batch` requests see: the context's entries, and each other.

    keep: the last layer answers for the last row of each request only.
    """
    K, length = config.block_size, context + rows
    blocks = -(-length // BLOCK)
    storage = [
        torch.randn(
            batch * blocks, BLOCK * K, config.num_key_value_heads, 2 * config.head_dim, device=where
        ).to(dtype)
        for _ in range(config.num_hidden_layers)
    ]
    caches = [each.transpose(1, 2) for each in storage]
    table = torch.arange(batch * blocks, dtype=torch.int32, device=where).view(batch, blocks)
    position = torch.arange(context, length, device=where)
    k = torch.arange(K, device=where)
    kv_slot = table.long().repeat_interleave(BLOCK, 1)[:, context:length] * BLOCK + position % BLOCK
    kv_index = kv_slot.flatten()[:, None] * K + k
    see = (position[:, None] * K + k + 1).int()  # [rows, K]
    lengths = torch.full((batch,), length * K, dtype=torch.int32, device=where)

    def queries(seen: Tensor) -> TreeAttentionBatch:
        """Those of some rows of every request; seen [n, K] int32."""
        host = [seen.numel() * request for request in range(batch + 1)]
        seen = seen.flatten().repeat(batch)
        return TreeAttentionBatch(
            table,
            BLOCK * K,
            torch.tensor(host, dtype=torch.int32, device=where),
            host,
            lengths,
            [length * K] * batch,
            seen,
            torch.zeros(len(seen), 1, dtype=torch.int64, device=where),
            lengths,
        )

    return PagedAttention(caches, kv_index, queries(see), queries(see[-1:]) if keep else None)


def forward(
    drafter: SpecBlockModel, form: str, context: int, batch: int, rows: int
) -> Callable[[], Any]:
    """A call that drafts one block: all layers, LM head, rank head.

    form: `FIRST` takes the target's states and answers for the last row of each request, `LATER`
    goes on from states of the drafter and answers for every row.
    """
    weight, config = drafter.norm.weight, drafter.config
    where, dtype, first = weight.device, weight.dtype, form == FIRST
    attend = attention_builder(config, context, batch, rows, first, where, dtype)
    count = batch * rows
    wide = 3 * config.target_hidden_size if first else config.hidden_size
    state = torch.randn(count, wide, device=where).to(dtype)
    embedding = torch.randn(count, config.hidden_size, device=where).to(dtype)
    base = torch.arange(context + 1, context + 1 + rows, device=where).repeat(batch)
    last = torch.arange(rows - 1, count, rows, device=where) if first else None

    def call():
        condition = drafter.condition(state) if first else state
        hidden = drafter(condition, embedding, base, attend, last)
        return drafter.candidates(hidden, WIDTH)

    return call


def bytes_to_read(drafter: SpecBlockModel, form: str, context: int, batch: int) -> int:
    """Weights that the form of forward needs, once, and the context's keys and values."""
    config = drafter.config
    held = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = sum(each.nbytes for name, each in held if not name.startswith(UNREAD))
    if form == LATER:
        weights -= drafter.input_layer.condition_proj.weight.nbytes
    kv_index = config.num_key_value_heads * 2 * config.head_dim * drafter.norm.weight.itemsize
    return weights + batch * context * config.block_size * config.num_hidden_layers * kv_index


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["forward", "batch", "rows each", "context", "µs", "bound µs", "times the bound"]]
    for each in results.values():
        bound = each["bound_us"]
        rows.append(
            [
                each["form"],
                str(each["batch"]),
                str(each["rows"]),
                str(each["context"]),
                f"{each['median_us']:.1f}",
                "–" if bound is None else f"{bound:.1f}",
                "–" if bound is None else f"{each['median_us'] / bound:.2f}",
            ]
        )
    return markdown_table(rows)


def main(
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MODELS)}; on a CPU tiny.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu for a tiny run of the same code.")
    ] = "cuda" if torch.cuda.is_available() else "cpu",
    rows: Annotated[str, typer.Option(help="T of a later block, batch 1.")] = "1,2,4,8,16,32,64",
    batches: Annotated[str, typer.Option(help="Batches of both forms.")] = "1,2,4,8,16,32,64",
    catch_up: Annotated[int, typer.Option(help="Rows per request of block 1: D + 1.")] = 9,
    starts: Annotated[int, typer.Option(help="Rows per request of a later block: S.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows.")] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Calls; the median counts.")] = 100,
    quantization: Annotated[
        str | None, typer.Option(help="fp8: weights in 8 bits; give another --out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON of the results.")] = MEASURED
    / "drafter_forward.json",
) -> None:
    """Time drafter forwards, print a table, write JSON."""
    where = torch.device(device)
    name = model or ("tiny" if where.type == "cpu" else "llama-8b")
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    settings = {
        "device": device_name(where),
        "model": name,
        "dtype": str(dtype),
        "context": context,
        "runs": runs,
        "quantization": quantization,
    }
    store = ResultsStore(out, settings)
    with TemporaryDirectory() as folder:
        drafter = make_drafter(write_target(Path(folder), MODELS[name], 0), MODELS[name])
    drafter = process_after_loading(drafter.to(where, dtype).eval(), quantization)
    peak = peak_bandwidth(where)
    cases = [(LATER, 1, count) for count in numbers(rows, "--rows")]
    for batch in numbers(batches, "--batches"):
        cases += [(FIRST, batch, catch_up), (LATER, batch, starts)]
    for form, batch, count in dict.fromkeys(cases):
        key = f"{form}, batch {batch}, rows {count}"
        if key in store:
            continue
        least = bytes_to_read(drafter, form, context, batch)
        with torch.inference_mode():
            took = time_call(forward(drafter, form, context, batch, count), where, runs)
        store.add(
            key,
            asdict(took)
            | {
                "form": form,
                "batch": batch,
                "rows": count,
                "context": context,
                "bytes": least,
                "bound_us": least / peak * 1e6 if peak else None,
            },
        )
    print(f"{settings}\n\n{table(store.results)}")


if __name__ == "__main__":
    typer.run(main)
