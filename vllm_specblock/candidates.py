"""Selection of a draft tree from scored candidates: join equal texts, keep the best N, sort.

Drafters list candidates, each with its parent, most of them unwanted. Shapes are fixed, and the
host reads no value. Candidates are ranked by one int64 key (`triton_kernels/tree/candidate_keys`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.candidate_keys import DEPTH_ONE, ROOT_HASH, keep, rank_key
from vllm_specblock.triton_kernels.tree.select_tree import (
    MOST_CANDIDATES,
    Candidates,
    TreeTensors,
    select_triton,
)

NEVER = float("-inf")
"""Score of an unused candidate."""


def tree_and_nodes(made: TreeTensors) -> tuple[DraftTree, Tensor]:
    """Return the trees, and the node of each candidate."""
    return DraftTree(*made[:-1]), made.node


def _select_triton(given: Candidates, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
    if given.key.shape[1] > MOST_CANDIDATES:
        return select.reference(given, budget, max_depth)
    return tree_and_nodes(select_triton(given, budget, max_depth))


@op(_select_triton)
def select(given: Candidates, budget: int, max_depth: int) -> tuple[DraftTree, Tensor]:
    """Join candidates of equal text, keep the best, sort them.

    The best of equal texts is kept, and takes the children of the others. Parents stay first: a
    child scores no higher than its own parent, which scores no higher than the kept one.

    Args:
        budget: N, at most 256, else ValueError.
        max_depth: no path is longer.

    Returns:
        the trees, and [R, C] int64, the node of each candidate; see `keep`.
    """
    candidate, node = keep(given.key, given.path_hash, budget)
    used = candidate > 0
    tree = DraftTree.from_nodes(
        torch.where(used, given.token.gather(1, candidate), 0),
        torch.where(used, node.gather(1, given.parent.gather(1, candidate)), -1).int(),
        torch.where(used, given.score.gather(1, candidate), NEVER),
        used.sum(1, dtype=torch.int32),
        max_depth,
    )
    return tree, node


def select_nodes(
    token: Tensor, parent: Tensor, score: Tensor, depth: Tensor, budget: int, max_depth: int
) -> DraftTree:
    """Return the trees of candidates without the root, no two of equal text; see `with_root`."""
    return select(with_root(token, parent, score, depth, None), budget, max_depth)[0]


def with_root(
    token: Tensor, parent: Tensor, score: Tensor, depth: Tensor, path_hash: Tensor | None
) -> Candidates:
    """Prepend the root to candidates.

    parent: 0 for the root, else 1 + the number of the candidate. depth: int64, 1 for a child of the
    root; broadcasts.
    """

    def rooted(values: Tensor, root: int) -> Tensor:
        return torch.nn.functional.pad(values, (1, 0), value=root)

    index = torch.arange(1, token.shape[1] + 1, device=token.device)
    tie = (depth * DEPTH_ONE + index).expand_as(token)
    return Candidates(
        rooted(token, 0),
        rooted(parent, 0),
        rooted(score, 0),
        rooted(rank_key(score, tie), 0),
        None if path_hash is None else rooted(path_hash, ROOT_HASH),
    )
