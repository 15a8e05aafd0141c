"""Ranks and text hashes of a tree's candidates, one int64 each.

A key sorts candidates, best first: bits 32-62 hold -score (as float bits; +inf: not wanted), bits
24-31 the depth, bits 0-23 the index. Ties go to the shallower, then to the earlier candidate.
Candidate 0 is the root.
"""

from __future__ import annotations

import torch

CLOSED = 0x7F800000 << 32
"""Key of a score of -inf: nodes have smaller keys."""
ROOT_HASH = 1
"""Not 0, so that a leading token 0 counts."""
MAX_DEPTH = 255
DEPTH_ONE = 1 << 24
"""Increment of a key per token of a path."""
INDEX_BITS = DEPTH_ONE - 1
FIRST = -(1 << 63)
"""Key bit that sorts before all others."""
PATH_FACTOR = -7046029254386353131
"""The hash of a text is its last token + PATH_FACTOR · the hash of its prefix, wrapping."""


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
