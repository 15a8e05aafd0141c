"""Accepted path from the target's draws, for CPUs; see `accept_path.py`."""

from __future__ import annotations

import torch

from ..optional_numba import njit
from ..tree.store_tree import KeptTrees
from .accept_path import DrawnRows


def accept_path_numba(rows: DrawnRows, trees: KeptTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept paths; arguments and results as in `verify.accept_path.accept_path_rows`."""
    output = torch.zeros(len(rows.req_idx), trees.path.shape[1], dtype=torch.int64)
    num_sampled = torch.empty(len(rows.req_idx), dtype=torch.int32)
    made = trees.parent, trees.depth, trees.path, trees.accepted, output, num_sampled
    _walk(*(x.contiguous().numpy() for x in rows), *(x.numpy() for x in made))
    return output, num_sampled


@njit
def _walk(
    token,  # [rows] integers
    drawn,  # [rows] int64
    first_row,  # [R+1] int32
    req_idx,  # [R] integers
    parent,  # [S, N] int32
    depth,  # [S, N+1] int64
    path,  # [S, D+1] int64
    accepted,  # [S] int32
    output,  # [R, D+1] int64, zeros
    num_sampled,  # [R] int32
):
    most, deepest = parent.shape[1], path.shape[1] - 1
    reached = [False] * (most + 1)
    for request in range(len(req_idx)):
        at, first = req_idx[request], min(first_row[request], len(drawn) - 1)
        nodes = min(first_row[request + 1] - first_row[request] - 1, most)
        reached[0], end = True, 0
        for node in range(1, nodes + 1):
            above, row = parent[at, node - 1], first + node
            reached[node] = (
                token[row] >= 0
                and above >= 0
                and reached[above]
                and token[row] == drawn[first + above]
                and depth[at, node] <= deepest
            )
            if reached[node] and depth[at, node] > depth[at, end]:
                end = node
        length = depth[at, end]
        path[at] = 0
        for place in range(length, -1, -1):
            path[at, place] = end
            output[request, place] = drawn[first + end]
            end = parent[at, end - 1]  # not read after the root
        accepted[at] = length
        num_sampled[request] = length + 1
