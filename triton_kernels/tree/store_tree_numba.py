"""Trees into their slots, for CPUs; see `store_tree.py`."""

from __future__ import annotations

import torch

from ..optional_numba import njit


def store_tree_numba(req_idx: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Arguments as `store_tree_triton` has them."""
    given = (req_idx, *tensors[:5])
    _store(*(x.contiguous().numpy() for x in given), *(x.numpy() for x in tensors[5:]))


@njit
def _store(
    req_idx,  # [R] integers
    parent,  # [R, N] int32
    depth,  # [R, N] int32
    ancestors,  # [R, N+1, W] int64
    score,  # [R, N] fp32
    origin,  # [R, N] uint8
    kept_parent,  # [S, N] int32, written as all that follows
    kept_depth,  # [S, N+1] int64
    kept_ancestors,  # [S, N+1, W] int64
    kept_score,  # [S, N] fp32
    kept_origin,  # [S, N] uint8
    accepted,  # [S] int32
):
    for request in range(len(req_idx)):
        at = req_idx[request]
        kept_parent[at] = parent[request]
        kept_depth[at, 1:] = depth[request]
        kept_ancestors[at] = ancestors[request]
        kept_score[at] = score[request]
        kept_origin[at] = origin[request]
        accepted[at] = 0
