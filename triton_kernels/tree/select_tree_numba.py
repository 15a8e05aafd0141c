"""Selection of a tree from candidates, for CPUs.

See `select_tree.py`; the torch reference is `vllm_specblock.candidates.select`.
"""

from __future__ import annotations

import numpy as np
import torch

from ..op import views
from ..optional_numba import njit
from .candidate_keys import CLOSED, INDEX_BITS
from .select_tree import Candidates, TreeTensors


def select_numba(given: Candidates, budget: int, max_depth: int | None = None) -> TreeTensors:
    """Select trees; arguments as in `vllm_specblock.candidates.select`; `max_depth` is unused."""
    key, joins = given.key, given.path_hash is not None
    tree = TreeTensors.empty(len(key), budget, torch.empty_like(key).contiguous())
    arrays = Candidates._make((key if x is None else x).contiguous() for x in given)
    _select(views(arrays), joins, views(tree))
    return tree


@njit
def _select(given, joins, tree):
    """Write `tree`. joins: texts may be equal."""
    token, parent, score, key, path_hash = given
    ancestors, node = tree.ancestors, tree.node
    count, budget = key.shape[1], tree.token.shape[1]
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
        tree.token[r] = 0
        tree.parent[r] = -1
        tree.depth[r] = 1
        tree.logprob[r] = -np.inf
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
                tree.token[r, n], tree.logprob[r, n] = token[r, c], score[r, c]
                tree.parent[r, n] = above
                if above:
                    tree.depth[r, n] = tree.depth[r, above - 1] + 1
                for word in range(ancestors.shape[2]):
                    ancestors[r, kept, word] |= ancestors[r, above, word]
            kept += 1
        tree.size[r] = min(kept - 1, budget)
