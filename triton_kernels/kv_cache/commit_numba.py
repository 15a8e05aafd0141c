"""Commit of accepted paths, for CPUs; see `commit.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit
from .commit import AcceptedRows, KVCacheSet, move_kv


def move_path_numba(
    kv_caches: KVCacheSet,
    slot_mapping: torch.Tensor,
    rows: AcceptedRows,
    num_rows: int,
) -> None:
    """Move a path; arguments as in `commit.move.move_path`."""
    of_requests = (x.contiguous().numpy() for x in rows)
    source, target = _slots(slot_mapping.numpy(), *of_requests, num_rows - 1)
    if len(source):
        slots = torch.from_numpy(source), torch.from_numpy(target)
        move_kv(kv_caches, *slots, torch.ones(len(source), dtype=torch.bool))


@njit
def _slots(
    slot_mapping,  # [≥ batch rows] int64
    query_start,  # [R] int32
    base,  # [R] int64
    path,  # [R, D + 1] int64
    accepted,  # [R] int32
    last_row,
):
    """Return source and target slots of the moves, by request and row."""
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
