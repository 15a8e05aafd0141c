"""Selection of a draft tree from scored candidates: join equal texts, keep the best N, sort.

Drafters list candidates, each with its parent, most of them unwanted. Shapes are fixed, and the
host reads no value. Candidates are ranked by one int64 key (`triton_kernels/tree/candidate_keys`).
"""

from __future__ import annotations

import torch

from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    INDEX_BITS,
    PATH_FACTOR,
    ROOT_HASH,
)
from vllm_specblock.triton_kernels.tree.select_tree import (
    MOST_CANDIDATES,
    Candidates,
    TreeTensors,
    select_triton,
)

NEVER = float("-inf")
"""Score of an unused candidate."""


def extend_hash(
    path_hash: torch.Tensor, token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the hash of a text extended by one token, in wrapping int64; arguments broadcast.

    A collision misplaces a draft, which the target verifies like any other.
    """
    return torch.add(token, path_hash, alpha=PATH_FACTOR, out=out)


def rank_key(
    score: torch.Tensor, tie: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sort key of candidates.

    score: fp32, cumulative log-score, at most 0; −inf: unwanted. tie: int64, depth << 24 | index.
    """
    return torch.add(tie, score.abs().view(torch.int32), alpha=1 << 32, out=out)


def join(key: torch.Tensor, path_hash: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank candidates [R, C], the root first, and find those of equal text.

    Returns:
        order: [R, C] int64, candidates from best to worst; the root is the first.
        winner: [R, C] int64, by rank: the best rank of the same text.
    """
    order = key.sort(dim=1).values & INDEX_BITS
    # Nodes of equal text are neighbours once sorted by hash; the first of them is the best.
    by_hash, rank = path_hash.gather(1, order).sort(dim=1, stable=True)
    leads = torch.nn.functional.pad(by_hash[:, 1:] != by_hash[:, :-1], (1, 0), value=True)
    place = torch.arange(order.shape[1], device=order.device)
    leader = (place * leads).cummax(dim=1).values
    return order, torch.empty_like(order).scatter_(1, rank, rank.gather(1, leader))


def keep(
    key: torch.Tensor, path_hash: torch.Tensor | None, budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best N = `budget` of candidates, one of each text; see `Candidates`.

    Returns:
        [R, N] int64, the candidate of each node; 0 (the root): slot not in use.
        [R, C] int64, the node of each candidate; above N: over the budget; undefined for unwanted
            candidates.
    """
    if path_hash is None:
        order = key.sort(dim=1).values & INDEX_BITS
        kept = key.gather(1, order) < CLOSED
    else:
        order, winner = join(key, path_hash)
        place = torch.arange(key.shape[1], device=key.device)
        kept = (winner == place) & (key.gather(1, order) < CLOSED)
    rank_node = kept.cumsum(1) - 1  # 0 is the root
    of_text = rank_node if path_hash is None else rank_node.gather(1, winner)
    # Dropped candidates go to a last column, which is cut off. (On a CPU
    # `searchsorted` would do it too, but starts threads for as few as 200 values.)
    column = torch.where(kept, rank_node, budget + 1).clamp_(max=budget + 1)
    candidate = order.new_zeros(len(order), budget + 2).scatter_(1, column, order)[:, 1:-1]
    return candidate, torch.empty_like(order).scatter_(1, order, of_text)


def tree_of(made: tuple[torch.Tensor, ...]) -> DraftTree:
    """Return the trees of `TreeTensors`."""
    return DraftTree(*made[:-1])


def tree_and_nodes(made: TreeTensors) -> tuple[DraftTree, torch.Tensor]:
    """Return the trees, and the node of each candidate."""
    return tree_of(made), made.node


def _select_triton(
    given: Candidates, budget: int, max_depth: int
) -> tuple[DraftTree, torch.Tensor]:
    if given.key.shape[1] > MOST_CANDIDATES:
        return select.reference(given, budget, max_depth)
    return tree_and_nodes(select_triton(given, budget, max_depth))


@op(_select_triton)
def select(given: Candidates, budget: int, max_depth: int) -> tuple[DraftTree, torch.Tensor]:
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
    token: torch.Tensor,
    parent: torch.Tensor,
    score: torch.Tensor,
    depth: torch.Tensor,
    path_hash: torch.Tensor | None,
    budget: int,
    max_depth: int,
) -> DraftTree:
    """Return the trees of candidates without the root; as `with_root` and `select`."""
    return select(with_root(token, parent, score, depth, path_hash), budget, max_depth)[0]


def with_root(
    token: torch.Tensor,
    parent: torch.Tensor,
    score: torch.Tensor,
    depth: torch.Tensor,
    path_hash: torch.Tensor | None,
) -> Candidates:
    """Prepend the root to candidates.

    parent: 0 for the root, else 1 + the number of the candidate. depth: int64, 1 for a child of the
    root; broadcasts.
    """

    def rooted(values: torch.Tensor, root: int) -> torch.Tensor:
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
