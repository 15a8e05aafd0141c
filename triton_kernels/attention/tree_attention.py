"""Attention over a paged KV cache under one visibility rule (SpecBlock paper, section 3.2).

Query t sees entries prefix_from[t] … prefix_len[t]-1 of its request, and of the 64·W entries from
tree_start on those whose bit is set in mask_words[t]. That covers prefill chunks and plain decode
(no bits), tree nodes (one bit per ancestor) and the drafter's blocks, in any mixture.

An entry is one key/value pair in the cache. A target has one per token; the drafter has K, and its
caller passes a cache view whose block_size is K times the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kv_cache.paged_rows import CacheStrides
from ..optional_triton import cdiv, next_power_of_2
from . import attention_schedule as cut
from .attention_inner import ReadConstants
from .attention_kernel import BatchPointers, BatchStrides, _tree_attention_kernel
from .attention_reduce import (
    REDUCE_ROWS,
    OutPointers,
    OutStrides,
    TileConstants,
    _merge_splits_kernel,
)


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: Iterable[int],
    seq_len: torch.Tensor,
    max_seq_len: int,
    prefix_len: torch.Tensor,
    mask_words: torch.Tensor,
    tree_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    prefix_from: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    unknown_up_to: int = 0,
) -> torch.Tensor:
    """Packed attention of T query tokens, the R requests one after the other, by Triton kernels.

    The grid depends on host integers only and nothing is read back, so the call can be captured in
    a CUDA graph.

    Args:
        query: [T, nh, D] fp32, bf16 or fp16.
        kv_cache: [num_blocks, nkv, block_size, 2D], any strides, keys first, of the queries' dtype
            or float8_e4m3fn; nh is a multiple of nkv.
        query_lens: the lengths of the requests, in query tokens, on the host, each once; no
            request may be longer than the largest. Requests of a missing length lose the
            guarantee of equal bits in every batch, nothing else.
        block_table, query_start, seq_len, max_seq_len, prefix_len, mask_words, tree_start,
            unknown_up_to: see `TreeAttentionBatch`; prefix_from: [≥T] int32.
        scale: multiplies the scores; positive.
        out: [T, nh, D], written to and returned; zeros for a query that sees nothing and for
            tokens past query_start[R].
        soft_cap: c > 0 turns every score s into c · tanh(s / c).
        key_scale, value_scale: one fp32 on the device each: keys and values are what the cache
            holds times this. Positive.
        sinks: [nh], an extra score of each head, with value zero.
        workspace: fp32, at least `workspace_size` elements; made if not given.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_requests = len(query_start) - 1
    group = num_heads // num_kv_heads
    shared, generation = cut.shared_memory(query.device), cut.generation(query.device)
    classes = cut.tile_classes(head_size, query.dtype, shared, generation)
    launches = cut.plan_launches(
        classes, query_lens, group, num_requests, num_kv_heads, max_seq_len, unknown_up_to
    )
    block_d = max(next_power_of_2(head_size), 16)
    # The kernel works on 32-bit halves of the words: 64-bit masks cost twice the registers.
    mask_words32 = mask_words.view(torch.int32)
    given = BatchPointers(
        query,
        kv_cache,
        block_table,
        query_start,
        seq_len,
        prefix_len,
        prefix_from,
        mask_words32,
        tree_start,
        key_scale,
    )
    into = OutPointers(out, value_scale, sinks)
    token, head, dim = query.stride()
    strides = BatchStrides(token, head, dim, block_table.stride(0), mask_words32.stride(0))
    cache_strides = CacheStrides(*kv_cache.stride())
    out_strides = OutStrides(*out.stride())
    for launch in launches:
        last = launch is launches[-1]
        block_m = launch.tile.rows
        partial = stats = None
        if not launch.whole:
            tiles = launch.requests * num_kv_heads * launch.slots
            if workspace is None:
                workspace = query.new_empty(
                    workspace_size(launches, num_kv_heads, head_size), dtype=torch.float32
                )
            partial = workspace[: tiles * block_m * block_d]
            stats = workspace[tiles * block_m * block_d :]
        tile_constants = TileConstants(
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD=head_size,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            PROGRAMS=cut.PROGRAMS,
            MAX_SPLITS=cut.MAX_SPLITS,
            SPLIT_ENTRIES=cut.SPLIT_ENTRIES,
        )
        read_constants = ReadConstants(
            BLOCK_SIZE=block_size,
            MASK_WORDS32=mask_words32.shape[1],
            BLOCK_N=launch.tile.entries,
            MASKED_N=launch.tile.masked_entries,
            CAPPED=soft_cap > 0,
            WHOLE=launch.whole,
            SINGLE=launch.single,
        )
        # One program row more than there are requests: it clears the tokens past query_start[R].
        slots = launch.tiles if launch.whole else launch.slots
        whole_from = launch.whole_from or None
        _tree_attention_kernel[(slots, launch.requests + last, num_kv_heads)](
            given,
            into,
            partial,
            stats,
            num_tokens,
            num_requests,
            max_seq_len,
            launch.above,
            launch.up_to,
            whole_from,
            scale,
            soft_cap,
            strides,
            cache_strides,
            out_strides,
            tile_constants,
            read_constants,
            num_warps=launch.tile.num_warps,
            num_stages=launch.tile.num_stages,
        )
        if not launch.whole:
            rows = cdiv(launch.tiles * block_m, REDUCE_ROWS)
            _merge_splits_kernel[(rows, launch.requests, num_kv_heads)](
                query_start,
                seq_len,
                into,
                partial,
                stats,
                max_seq_len,
                launch.above,
                launch.up_to,
                whole_from,
                launch.slots,
                out_strides,
                tile_constants,
                REDUCE_ROWS=REDUCE_ROWS,
                num_warps=4,
                num_stages=1,
            )
    return out


def workspace_size(launches: list[cut.Launch], num_kv_heads: int, head_size: int) -> int:
    """fp32 elements that the partial results of the launches need; they take turns.

    At most PROGRAMS · MAX_SPLITS tiles: 130 MiB for 128 rows of head size 128.
    """
    block_d = max(next_power_of_2(head_size), 16)
    return max(
        launch.requests * num_kv_heads * launch.slots * launch.tile.rows * (block_d + 2)
        for launch in launches
        if not launch.whole
    )
