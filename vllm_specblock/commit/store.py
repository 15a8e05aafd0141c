"""Writing keys and values into a paged cache."""

from __future__ import annotations

import torch


def store_kv(
    kv_cache: torch.Tensor, entry: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Store keys and values at their entries.

    Args:
        kv_cache: [blocks, kv heads, block size, 2D], a view whose entries are consecutive in
            memory from block to block (key first, then value).
        entry: [T] int64, block · block size + offset; negative for padding. Padding goes to
            entry 0, which lies in vLLM's null block: nobody reads it, and no branch depends
            on the data.
        key, value: [T, kv heads, D].

    Raises:
        RuntimeError: the entries of `kv_cache` are not consecutive in memory.
    """
    _, heads, _, width = kv_cache.shape
    flat = kv_cache.transpose(1, 2).view(-1, heads, width)
    flat[entry.clamp(min=0)] = torch.cat([key, value], dim=-1)
