"""Selection of a tree from candidates, for CPUs.

See `select_tree.py`; the torch reference is `vllm_specblock.candidates.select`.
"""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit
from .candidate_keys import CLOSED, INDEX_BITS
from .select_tree import Candidates, TreeTensors


def select_numba(given: Candidates, budget: int, max_depth: int | None = None) -> TreeTensors:
    """Select trees; arguments as in `vllm_specblock.candidates.select`; `max_depth` is unused."""
    key, joins = given.key, given.path_hash is not None
    tree = TreeTensors.empty(len(key), budget, torch.empty_like(key).contiguous())
    arrays = ((key if x is None else x).contiguous().numpy() for x in given)
    _select(*arrays, joins, *map(torch.Tensor.numpy, tree))
    return tree


@njit
def _select(
    token,  # [R, C] int64, as all until `path_hash`, but for
    parent,
    score,  # fp32
    key,
    path_hash,
    joins,  # texts may be equal
    tree_token,  # [R, N] int64
    tree_parent,  # [R, N] int32
    tree_depth,  # [R, N] int32
    tree_score,  # [R, N] fp32
    tree_size,  # [R] int32
    ancestors,  # [R, N+1, W] int64
    node,  # [R, C] int64
):
    count, budget = key.shape[1], tree_token.shape[1]
    room = 1
    while room < 2 * count:
        room *= 2
    first = np.empty(room if joins else 1, np.int64)  # by hash: the best candidate of a text, + 1
    ranked = np.empty(count, np.int64)
    for r in range(key.shape[0]):
        wanted = 0
        for c in range(count):
            node[r, c] = budget + 1
            if key[r, c] < CLOSED:
                ranked[wanted] = key[r, c]
                wanted += 1
        ranked[:wanted].sort()
        tree_token[r] = 0
        tree_parent[r] = -1
        tree_depth[r] = 1
        tree_score[r] = -np.inf
        ancestors[r] = 0
        for n in range(budget + 1):
            ancestors[r, n, n >> 6] = np.int64(1) << (n & 63)
            ancestors[r, n, 0] |= 1
        first[:] = 0
        kept = 0
        for rank in range(wanted):
            c = ranked[rank] & INDEX_BITS
            if joins:
                at = path_hash[r, c]
                at = (at ^ (at >> 29)) & (room - 1)
                while first[at] and path_hash[r, first[at] - 1] != path_hash[r, c]:
                    at = (at + 1) & (room - 1)
                if first[at]:
                    node[r, c] = node[r, first[at] - 1]
                    continue
                first[at] = c + 1
            node[r, c] = kept
            if 1 <= kept <= budget:
                n, above = kept - 1, node[r, parent[r, c]]
                tree_token[r, n], tree_score[r, n] = token[r, c], score[r, c]
                tree_parent[r, n] = above
                if above:
                    tree_depth[r, n] = tree_depth[r, above - 1] + 1
                for word in range(ancestors.shape[2]):
                    ancestors[r, kept, word] |= ancestors[r, above, word]
            kept += 1
        tree_size[r] = min(kept - 1, budget)
