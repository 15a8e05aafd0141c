"""Attention over a paged KV cache under one visibility rule (SpecBlock paper, section 3.2).

Query t sees entries prefix_from[t] … prefix_len[t]-1 of its request, and entry tree_start + j if
bit j of mask_words[t] is set. This covers prefill chunks and plain decode (no bits), tree nodes
(one bit per ancestor) and the drafter's blocks, in any mixture.

An entry is one key/value pair. A target has one per token; the drafter has K, and its cache view
has a block_size of K times the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..kv_cache.commit import CacheStrides
from ..optional_triton import cdiv, next_power_of_2
from . import attention_schedule as cut
from .attention_inner import ReadConstants
from .attention_kernel import _tree_attention_kernel
from .attention_reduce import (
    REDUCE_ROWS,
    OutPointers,
    RowStrides,
    TileConstants,
    _merge_splits_kernel,
)


class VisibleEntries(NamedTuple):
    """Visible entries of T query tokens of R requests, by the rule above."""

    block_table: torch.Tensor  # [R, max blocks] int32
    query_start: torch.Tensor  # [R+1] int32
    seq_len: torch.Tensor  # [≥R] int32, entries beyond which no query of a request sees anything
    prefix_len: torch.Tensor  # [≥T] int32
    prefix_from: torch.Tensor | None  # [≥T] int32; None: 0
    mask_words: torch.Tensor  # [≥T, W] int64
    tree_start: torch.Tensor  # [≥R] int32


class BatchBounds(NamedTuple):
    """Host numbers that launches are laid out for; see `TreeAttentionBatch`.

    query_lens: distinct lengths of the requests in query tokens; no request may exceed the largest.
        A request of a missing length may get other bits in other batches.
    """

    query_lens: Iterable[int]
    max_seq_len: int
    unknown_up_to: int = 0


class ScoreOptions(NamedTuple):
    """How scores and values are computed.

    scale: multiplies the scores; positive.
    soft_cap: c > 0 turns every score s into c · tanh(s / c).
    key_scale, value_scale: one fp32 on the device each, positive factors of stored keys and
        values.
    sinks: [nh], an extra score of each head, with value zero.
    query_scale: factor of float8 queries, like `key_scale`.
    """

    scale: float
    soft_cap: float = 0.0
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None


def tree_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    seen: VisibleEntries,
    bounds: BatchBounds,
    scores: ScoreOptions,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernels; arguments as in `tree_attention`.

    The grid depends on host integers only, so the call can be captured in a CUDA graph.
    """
    (num_tokens, num_heads, key_size), head_size = query.shape, out.shape[2]
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_requests = len(seen.query_start) - 1
    group = num_heads // num_kv_heads
    shared, generation = cut.shared_memory(query.device), cut.generation(query.device)
    classes = cut.tile_classes(head_size, query.dtype, shared, generation)
    launches = cut.plan_launches(
        classes,
        bounds.query_lens,
        group,
        num_requests,
        num_kv_heads,
        bounds.max_seq_len,
        bounds.unknown_up_to,
    )
    block_d = max(next_power_of_2(head_size), 16)
    # The kernel uses 32-bit halves of the words: 64-bit masks need twice the registers.
    mask_words32 = seen.mask_words.view(torch.int32)
    into = OutPointers(out, scores.value_scale, scores.sinks)
    out_strides = RowStrides(*out.stride())
    workspace = None
    for launch in launches:
        last = launch is launches[-1]
        block_m = launch.tile.rows
        partial = stats = None
        if not launch.whole:
            tiles = launch.requests * num_kv_heads * launch.slots
            if workspace is None:
                # At most PROGRAMS · MAX_SPLITS tiles: 130 MiB for 128 rows of head size 128.
                size = max(
                    each.requests * num_kv_heads * each.slots * each.tile.rows * (block_d + 2)
                    for each in launches
                    if not each.whole
                )
                workspace = query.new_empty(size, dtype=torch.float32)
            partial = workspace[: tiles * block_m * block_d]
            stats = workspace[tiles * block_m * block_d :]
        tile_constants = TileConstants(
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD=head_size,
            ROPE=key_size - head_size,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            BLOCK_ROPE=max(next_power_of_2(key_size - head_size), 16),
            PROGRAMS=cut.PROGRAMS,
            MAX_SPLITS=cut.MAX_SPLITS,
            SPLIT_ENTRIES=cut.SPLIT_ENTRIES,
        )
        read_constants = ReadConstants(
            BLOCK_SIZE=block_size,
            MASK_WORDS32=mask_words32.shape[1],
            BLOCK_N=launch.tile.entries,
            MASKED_N=launch.tile.masked_entries,
            CAPPED=scores.soft_cap > 0,
            WHOLE=launch.whole,
            SINGLE=launch.single,
            FP8=query.dtype == torch.float8_e4m3fn,
        )
        # One more program row clears the tokens past query_start[R].
        slots = launch.tiles if launch.whole else launch.slots
        serves = launch.above, launch.up_to, launch.whole_from or None
        _tree_attention_kernel[(slots, launch.requests + last, num_kv_heads)](
            query,
            kv_cache,
            seen._replace(mask_words=mask_words32),
            scores.query_scale,
            scores.key_scale,
            into,
            partial,
            stats,
            num_tokens,
            num_requests,
            bounds.max_seq_len,
            *serves,
            scores.scale,
            scores.soft_cap,
            RowStrides(*query.stride()),
            seen.block_table.stride(0),
            mask_words32.stride(0),
            CacheStrides(*kv_cache.stride()),
            out_strides,
            tile_constants,
            read_constants,
            num_warps=launch.tile.num_warps,
            num_stages=launch.tile.num_stages,
        )
        if not launch.whole:
            rows = cdiv(launch.tiles * block_m, REDUCE_ROWS)
            _merge_splits_kernel[(rows, launch.requests, num_kv_heads)](
                seen.query_start,
                seen.seq_len,
                into,
                partial,
                stats,
                bounds.max_seq_len,
                *serves,
                launch.slots,
                out_strides,
                tile_constants,
                num_warps=4,
                num_stages=1,
            )
    return out
