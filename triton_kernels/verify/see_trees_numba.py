"""What rows see and where they stand, for CPUs.

See `see_trees.py`; the torch reference is `vllm_specblock.verify.sight.Visibility`.
"""

from __future__ import annotations

import torch

from ..optional_numba import njit


def see_trees_numba(*tensors: torch.Tensor) -> None:
    """The tensors of `_see_trees`, in its order."""
    _see_trees(*(tensor.numpy() for tensor in tensors))


@njit
def _see_trees(
    position,  # [T] int64
    seq_len,  # [≥ R] int32
    slot,  # [R] integers
    node_start,  # [R+1] int32
    row,  # [L] int64
    owner,  # [L] integers
    node,  # [L] int32
    depth,  # [S, N+1] int64
    ancestors,  # [S, N+1, W] int64
    prefix_len,  # [≥ T] int32, written as all that follows
    words,  # [≥ T, W] int64
    window_start,  # [≥ R] int32
    model_position,  # [≥ T] int64
    node_position,  # [≥ L] int64
):
    for t in range(len(position)):
        prefix_len[t] = position[t] + 1
        words[t] = 0
        model_position[t] = position[t]
    for n in range(len(row)):
        t, at, which = row[n], owner[n], node[n]
        root = position[t] - which
        prefix_len[t] = root
        words[t] = ancestors[at, which]
        model_position[t] = node_position[n] = root + depth[at, which]
    for request in range(len(slot)):
        nodes = node_start[request + 1] - node_start[request]
        window_start[request] = seq_len[request] - nodes
