"""Compilation of tree attention at start-up, for every kernel that a batch may need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .attention import attention_schedule as cut
from .attention.tree_attention_batch import TreeAttentionBatch
from .optional_triton import cdiv


def compile_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_words: int,
    max_query_len: int,
    max_seq_len: int,
    value_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Launch every kernel that batches of a layer can need, on next to no work.

    Strides, dtypes and options are compiled for, so they are the layer's own.

    Args:
        query: [≥ 1, nh, D] of the layer's dtype; only its form is read.
        kv_cache: at least one block.
        block_table: [R, max blocks] int32 of valid blocks, R the most requests of a batch.
        num_words: W.
        max_query_len, max_seq_len: what a batch can have at most.
        value_size: Dv; None: D.
        out_dtype: dtype of the output; None: the query's.
        options: as `TreeAttentionBatch.attend` has them.
    """
    device, (num_heads, key_size) = query.device, query.shape[1:]
    value_size = value_size or key_size
    num_kv_heads = kv_cache.shape[1]
    shared, generation = cut.shared_memory(device), cut.generation(device)
    classes = cut.tile_classes(value_size, query.dtype, shared, generation)
    most = len(block_table), max_query_len, max_seq_len
    shapes = shapes_to_compile(classes, num_heads // num_kv_heads, num_kv_heads, *most)
    for query_len, num_requests, seq_len in shapes:
        rows = query_len * num_requests
        start = [query_len * request for request in range(num_requests + 1)]
        one = torch.ones(rows, dtype=torch.int32, device=device)
        queries = TreeAttentionBatch(
            block_table[:num_requests],
            torch.arange(0, rows + 1, query_len, dtype=torch.int32, device=device),
            start,
            one[:num_requests],
            seq_len,
            one,
            torch.zeros(rows, num_words, dtype=torch.int64, device=device),
            one[:num_requests],
        )
        asked = query.new_zeros(rows, num_heads, key_size)
        out = asked.new_empty(rows, num_heads, value_size, dtype=out_dtype)
        queries.attend(asked, kv_cache, 1.0, out, **options)
        if options.get("packing") is not None:
            queries.causal()


def shapes_to_compile(
    classes: tuple[cut.Tile, ...],
    group: int,
    num_kv_heads: int,
    max_requests: int,
    max_query_len: int,
    max_seq_len: int,
) -> Iterator[tuple[int, int, int]]:
    """(query tokens of a request, requests, bound of their entries), for all kernels of a layer.

    Of each class of tiles there are three: requests with one split, one program per split, one
    program for all splits. The last takes many requests, or one with many tiles.
    """
    lengths = {min(max(tile.rows // group, 1), max_query_len) for tile in classes}
    tiles = cdiv(cut.PROGRAMS, num_kv_heads)
    lengths.add(min(max(tiles * classes[-1].rows // group, 1), max_query_len))
    for query_len in sorted(lengths):
        filling = cut.PROGRAMS, num_kv_heads * cdiv(query_len * group, classes[-1].rows)
        many = min(cdiv(*filling), max_requests)
        for num_requests in sorted({1, many}):
            for seq_len in (1, max_seq_len):
                yield query_len, num_requests, seq_len
