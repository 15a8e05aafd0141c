"""Bringing an accepted path together, for CPUs: all layers in one call; see `commit.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import at_address, njit
from .commit import AcceptedRows, KVCacheSet


def move_path_numba(
    kv_caches: KVCacheSet,
    slot_mapping: torch.Tensor,
    rows: AcceptedRows,
    num_rows: int,
) -> None:
    """Arguments as `commit.move.move_path` has them.

    Raises:
        ValueError: the elements of an entry are not consecutive.
    """
    of_requests = (x.contiguous().numpy() for x in rows)
    source, target = _slots(slot_mapping.numpy(), *of_requests, num_rows - 1)
    if not len(source):
        return
    cache = kv_caches.caches[0]
    if kv_caches.packing is not None:
        from ..attention.cpu_packing import move_packed

        slots = torch.from_numpy(source), torch.from_numpy(target)
        return move_packed(kv_caches.pointers, cache.stride(0), kv_caches.packing, *slots)
    if cache.stride(-1) != 1:
        raise ValueError("The elements of a cache entry are not side by side.")
    size = cache.element_size()
    strides = [stride * size for stride in cache.stride()[:3]]
    _move(
        kv_caches.pointers.numpy(),
        source,
        target,
        *strides,
        cache.shape[1],
        cache.shape[2],
        cache.shape[3] * size,
    )


@njit
def _slots(
    slot_mapping,  # [≥ batch rows] int64
    query_start,  # [R] int32
    base,  # [R] int64
    path,  # [R, D + 1] int64
    accepted,  # [R] int32
    last_row,
):
    """→ source, target: the slots of what moves, request by request, row by row."""
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
            if read >= 0 and write >= 0:
                source[moves], target[moves] = read, write
                moves += 1
    return source[:moves], target[:moves]


@njit
def _move(
    address,  # [layers] int64
    source,  # [moves] int64
    target,  # [moves] int64
    block_bytes,
    head_bytes,
    entry_bytes,
    num_heads,
    block_size,
    width,  # bytes of an entry
):
    """Row by row: a node moves down, past those alone that have moved before it."""
    for start in address:
        for move in range(len(source)):
            old, new = source[move], target[move]
            from_byte = start + old // block_size * block_bytes + old % block_size * entry_bytes
            to_byte = start + new // block_size * block_bytes + new % block_size * entry_bytes
            for head in range(num_heads):
                read = at_address(from_byte + head * head_bytes, width)
                write = at_address(to_byte + head * head_bytes, width)
                for i in range(width):
                    write[i] = read[i]
