"""A paged KV cache in any memory layout, seen as one flat list of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, tl


class CacheStrides(NamedTuple):
    """Strides of a cache [num_blocks, num_kv_heads, block_size, C]."""

    block: int
    head: int
    entry: int
    dim: int


@jit
def entry_offset(
    entry,  # int64 = block · BLOCK_SIZE + place in the block
    strides,  # CacheStrides
    BLOCK_SIZE: tl.constexpr,
):
    """Offset of cache entries in a paged cache."""
    return entry // BLOCK_SIZE * strides.block + entry % BLOCK_SIZE * strides.entry


def flat_rows(kv_cache: torch.Tensor) -> torch.Tensor | None:
    """View kv_cache [num_blocks, num_kv_heads, block_size, C] as [rows, C], sharing its memory.

    Row numbers come from `row_index`. With other tensors packed in between (one page for many
    layers), some rows are not this cache's; `row_index` never names them. None if a stride does
    not count whole rows: then there is no such view.
    """
    *outer, last = kv_cache.stride()
    width = kv_cache.shape[-1]
    if last != 1 or any(stride % width for stride in outer):
        return None
    reach = sum(stride * (size - 1) for stride, size in zip(outer, kv_cache.shape))
    return kv_cache.as_strided((reach // width + 1, width), (width, 1))


def row_index(
    kv_cache: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, heads_dim: int
) -> torch.Tensor:
    """Numbers of the rows in `flat_rows(kv_cache)` that hold the given entries, for every head.

    block, offset [...] int64: which block, which entry in it. -> the same shape with a dim of
    size num_kv_heads inserted at `heads_dim` (negative counts from the end of the result).
    """
    of_block, of_head, of_entry = (s // kv_cache.shape[-1] for s in kv_cache.stride()[:3])
    kv_index = (block * of_block + offset * of_entry).unsqueeze(heads_dim)
    head = torch.arange(kv_cache.shape[1], device=kv_index.device) * of_head
    spread = [1] * kv_index.dim()
    spread[heads_dim] = -1
    return kv_index + head.view(spread)
