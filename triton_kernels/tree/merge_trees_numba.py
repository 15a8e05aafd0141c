"""Merge of two trees, with the drafters of each node, for CPUs: a sixth of torch's time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..op import views
from ..optional_numba import njit
from .candidate_keys import CLOSED, DEPTH_ONE, PATH_FACTOR, ROOT_HASH
from .select_tree import Candidates, TreeTensors
from .select_tree_numba import select_numba


def merge_trees_numba(
    first: Any, second: Any, joins: bool, budget: int, max_depth: int
) -> tuple[TreeTensors, torch.Tensor, torch.Tensor]:
    """Merge trees; arguments and results as in `merge_trees_triton`; `max_depth` is unused."""
    requests, ours = first.token.shape
    count = 1 + ours + second.token.shape[1]
    token, parent, key, path_hash = torch.empty(4, requests, count, dtype=torch.int64)
    made = Candidates(token, parent, torch.empty(requests, count), key, path_hash)
    for tree, at in (first, 0), (second, ours):
        fields = tree.token, tree.parent, tree.depth, tree.logprob
        _lay_side_by_side(*views([x.contiguous() for x in fields]), at, views(made))
    tree = select_numba(made if joins else made._replace(path_hash=None), budget)
    origin = torch.zeros(requests, budget, dtype=torch.uint8)
    _authors(key.numpy(), tree.node.numpy(), ours, origin.numpy())
    said = (first.size > 0) & (second.size > 0)
    return tree, origin, said & (first.token[:, 0] == second.token[:, 0])


@njit
def _lay_side_by_side(
    of_token,  # [R, n] int64
    of_parent,  # [R, n] int32, −1: not in use
    of_depth,  # [R, n] int32
    of_score,  # [R, n] fp32
    before,  # nodes of the trees before this one
    made,  # Candidates, written
):
    """Write a tree's nodes as candidates, after the root and other trees' nodes.

    The paper's indices (§4.1): φ(0) = 0, and φ(i) = n₁ + i in the second tree, n₁ being the first
    one's node slots, in use or not.
    """
    token, parent, score, key, path_hash = made
    for r in range(of_token.shape[0]):
        if before == 0:
            token[r, 0], parent[r, 0], score[r, 0], key[r, 0] = 0, 0, 0.0, 0
            path_hash[r, 0] = ROOT_HASH
        for n in range(of_token.shape[1]):
            c, above = 1 + before + n, max(of_parent[r, n], 0)
            if above:
                above += before
            token[r, c], parent[r, c], score[r, c] = of_token[r, n], above, of_score[r, n]
            path_hash[r, c] = of_token[r, n] + path_hash[r, above] * PATH_FACTOR
            bits = np.float32(abs(of_score[r, n])).view(np.int32)
            key[r, c] = (np.int64(bits) << 32) + np.int64(of_depth[r, n]) * DEPTH_ONE + c


@njit
def _authors(
    key,  # [R, C] int64
    node,  # [R, C] int64
    ours,  # candidates of the first drafter, behind the root
    origin,  # [R, N] uint8, zeros
):
    for r in range(key.shape[0]):
        for c in range(1, key.shape[1]):
            if key[r, c] < CLOSED and 1 <= node[r, c] <= origin.shape[1]:
                origin[r, node[r, c] - 1] |= 1 if c <= ours else 2
