"""Bringing an accepted path together, for CPUs: all layers in one call; see `commit.py`."""

from __future__ import annotations

import numpy as np
import torch

from .commit import KVCacheSet
from .optional_numba import at_address, njit


def move_path_numba(
    kv_caches: KVCacheSet,
    slot_mapping: torch.Tensor,
    query_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    num_rows: int,
) -> None:
    """Arguments as `commit.move.move_path` has them; an entry's elements are consecutive."""
    cache = kv_caches.caches[0]
    size = cache.element_size()
    strides = [stride * size for stride in cache.stride()[:3]]
    _move(
        kv_caches.pointers.numpy(), slot_mapping.numpy(), query_start.contiguous().numpy(),
        base.contiguous().numpy(), path.contiguous().numpy(), accepted.contiguous().numpy(),
        num_rows - 1, *strides, cache.shape[1], cache.shape[2], cache.shape[3] * size,
    )  # fmt: skip


@njit
def _move(
    address,  # [layers] int64
    slot_mapping,  # [≥ batch rows] int64
    query_start,  # [R] int64
    base,  # [R] int64
    path,  # [R, D + 1] int64
    accepted,  # [R] int32
    last_row,
    block_bytes,
    head_bytes,
    entry_bytes,
    num_heads,
    block_size,
    width,  # bytes of an entry
):
    """Row by row: a node moves down, past those alone that have moved before it."""
    count, depth = path.shape[0], path.shape[1] - 1
    source, target = np.empty(count * depth, np.int64), np.empty(count * depth, np.int64)
    moves = 0
    for request in range(count):
        root = query_start[request] + base[request] - 1
        for place in range(1, min(accepted[request], depth) + 1):
            node = path[request, place]
            if node == place:
                continue
            read = slot_mapping[min(root + node, last_row)]
            write = slot_mapping[min(root + place, last_row)]
            if read < 0 or write < 0:
                continue
            source[moves] = read // block_size * block_bytes + read % block_size * entry_bytes
            target[moves] = write // block_size * block_bytes + write % block_size * entry_bytes
            moves += 1
    for start in address:
        for move in range(moves):
            for head in range(num_heads):
                at = start + head * head_bytes
                read, write = (
                    at_address(at + source[move], width),
                    at_address(at + target[move], width),
                )
                for i in range(width):
                    write[i] = read[i]
