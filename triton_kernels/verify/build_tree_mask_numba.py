"""Tree attention mask and positions of a batch, for CPUs.

See `build_tree_mask.py`; the torch reference is `vllm_specblock.verify.tree_mask.TreeMask`.
"""

from __future__ import annotations

import torch

from ..optional_numba import njit


def build_tree_mask_numba(*tensors: torch.Tensor) -> None:
    """The tensors of `_build_tree_mask`, in its order."""
    _build_tree_mask(*(tensor.numpy() for tensor in tensors))


@njit
def _build_tree_mask(
    position,  # [T] int64
    seq_len,  # [≥ R] int32
    req_idx,  # [R] integers
    node_start,  # [R+1] int32
    row,  # [L] int64
    row_req_idx,  # [L] integers
    node,  # [L] int32
    depth,  # [S, N+1] int64
    ancestors,  # [S, N+1, W] int64
    prefix_len,  # [≥ T] int32, written as all that follows
    mask_words,  # [≥ T, W] int64
    tree_start,  # [≥ R] int32
    model_position,  # [≥ T] int64
    node_position,  # [≥ L] int64
):
    for t in range(len(position)):
        prefix_len[t] = position[t] + 1
        mask_words[t] = 0
        model_position[t] = position[t]
    for n in range(len(row)):
        t, at, which = row[n], row_req_idx[n], node[n]
        root = position[t] - which
        prefix_len[t] = root
        mask_words[t] = ancestors[at, which]
        model_position[t] = node_position[n] = root + depth[at, which]
    for request in range(len(req_idx)):
        nodes = node_start[request + 1] - node_start[request]
        tree_start[request] = seq_len[request] - nodes
