"""Compilation of tree attention at start-up, for every kernel that a batch may need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .attention import attention_schedule as cut
from .attention.tree_attention_batch import TreeAttentionBatch
from .optional_triton import cdiv

if TYPE_CHECKING:  # it needs numba
    from .attention.cpu_packing import Packing


def compile_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_words: int,
    max_query_len: int,
    max_seq_len: int,
    *,
    window: int | None = None,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    packing: Packing | None = None,
) -> None:
    """Launch every kernel that batches of a layer can need, on next to no work.

    Strides and dtypes are compiled for, so they are the layer's own; the last five arguments, too.

    Args:
        query: [≥ 1, nh, D] of the layer's dtype; only its form is read.
        kv_cache: at least one block.
        block_table: [R, max blocks] int32 of valid blocks, R the most requests of a batch.
        num_words: W.
        max_query_len, max_seq_len: what a batch can have at most.
    """
    device, (num_heads, head_size) = query.device, query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[1:3]
    shared, generation = cut.shared_memory(device), cut.generation(device)
    classes = cut.tile_classes(head_size, query.dtype, shared, generation)
    shapes = shapes_to_compile(
        classes,
        num_heads // num_kv_heads,
        num_kv_heads,
        len(block_table),
        max_query_len,
        max_seq_len,
    )
    for query_len, num_requests, seq_len in shapes:
        rows = query_len * num_requests
        start = [query_len * request for request in range(num_requests + 1)]
        one = torch.ones(rows, dtype=torch.int32, device=device)
        queries = TreeAttentionBatch(
            block_table[:num_requests],
            block_size,
            torch.arange(0, rows + 1, query_len, dtype=torch.int32, device=device),
            start,
            one[:num_requests],
            [1] * num_requests,
            one,
            torch.zeros(rows, num_words, dtype=torch.int64, device=device),
            one[:num_requests],
            max_seq_len=seq_len,
        )
        queries.attend(
            query.new_zeros(rows, num_heads, head_size),
            kv_cache,
            1.0,
            window=window,
            soft_cap=soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=sinks,
            packing=packing,
        )
        if packing is not None:
            queries.causal()


def shapes_to_compile(
    classes: tuple[cut.Tile, ...],
    group: int,
    num_kv_heads: int,
    max_requests: int,
    max_query_len: int,
    max_seq_len: int,
) -> Iterator[tuple[int, int, int]]:
    """(query tokens of a request, requests, bound of their entries), one for each kernel.

    Of each class of tiles there are three: requests with one split, one program per split, one
    program for all splits. The last takes many requests, or one with many tiles.
    """
    seen: set[tuple[object, ...]] = set()
    lengths = {min(max(tile.rows // group, 1), max_query_len) for tile in classes}
    tiles = cdiv(cut.PROGRAMS, num_kv_heads)
    lengths.add(min(max(tiles * classes[-1].rows // group, 1), max_query_len))
    for query_len in sorted(lengths):
        many = min(
            cdiv(cut.PROGRAMS, num_kv_heads * cdiv(query_len * group, classes[-1].rows)),
            max_requests,
        )
        for num_requests in sorted({1, many}):
            for seq_len in (1, max_seq_len):
                launches = cut.plan_launches(
                    classes, {query_len}, group, num_requests, num_kv_heads, seq_len
                )
                kernels = {(launch.tile, launch.whole, launch.single) for launch in launches}
                if not kernels <= seen:
                    seen |= kernels
                    yield query_len, num_requests, seq_len
