"""Profiles of acceptance, α by depth, and vLLM's keys that impose one.

α_k is the probability that the drafter's first choice at depth k is right, given that all before it
were. The paper (appendix C) gives α_1 > 0.80, a smooth decay, and α_8; the rest is in a plot. So: a
straight line from 0.80 to α_8, raised to the power at which the tree of 60 nodes has the given τ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape

from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.tree import DraftTree

FIRST_ALPHA = 0.80
LAST_ALPHA = {"llama-8b": 0.544, "qwen3-8b": 0.369}
"""α_8 of the paper's drafters for Llama-3.1-8B and Qwen3-8B; other targets borrow the first."""
DEPTHS = 8
SECOND = 0.3
"""Share of the remaining probability that each next rank takes, about as the example drafter's
(`benchmarks/results/rank_and_scores.md`)."""
PAPER_TREE = TreeShape(4, 2, 8, (4, 8, 16, 16), 60)
"""K, M, S, branching and nodes; the paper's tree has these, and narrower branching."""


def line(model: str, power: float = 1.0) -> list[float]:
    slope = (LAST_ALPHA.get(model, LAST_ALPHA["llama-8b"]) - FIRST_ALPHA) / (DEPTHS - 1)
    return [(FIRST_ALPHA + slope * k) ** power for k in range(DEPTHS)]


def candidate_probabilities(best: torch.Tensor, count: int) -> torch.Tensor:
    """Probabilities of the first `count` candidates: α, then (1 − α) · q · (1 − q)^i.

    q is `SECOND`, or less where the second candidate would otherwise pass the first.

    Args:
        best: [...] fp32, α in 0 … 1.

    Returns:
        [..., count] fp32, descending; the sum over all ranks is 1.
    """
    rest = 1 - best
    share = torch.where(rest > 0, best / rest, 1).clamp(max=SECOND)
    further = torch.arange(count - 1, device=best.device)
    others = (rest * share)[..., None] * (1 - share)[..., None] ** further
    return torch.cat([best[..., None], others], -1)


def synthetic_tree(shape: TreeShape, best: Sequence[float]) -> DraftTree:
    """Return the tree (R = 1) that `shape` grows from the imposed distributions, on the CPU.

    best: α by depth. Every position has the widest bucket's children: the score alone decides.
    """
    K, B, S = shape.block_size, shape.width, shape.num_starts
    bucket = torch.tensor(shape.branching).argmax()
    logprob = candidate_probabilities(torch.tensor(list(best)), B).log()  # [depths, B]
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)

    def distributions(depth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows that start below so many tokens, `depth` [1, rows]."""
        at = (depth[..., None] + torch.arange(K)).clamp(max=len(logprob) - 1)
        # Siblings differ in their tokens, and so do all texts.
        return logprob[at], torch.arange(B).expand(*at.shape, B), bucket.expand(at.shape)

    depth = torch.zeros(1, 1, dtype=torch.int64)  # [1, rows so far]
    grown = expansion.attach(None, *distributions(depth))
    while isinstance(grown, NextStarts):
        reach = depth.gather(1, grown.row) + grown.position + 1  # [1, S]
        grown = expansion.attach(grown, *distributions(reach))
        depth = torch.cat([depth, reach.view(1, S)], 1)
    return grown


def tree_tau(best: list[float], shape: TreeShape) -> float:
    """Return the τ of trees: the sum of their nodes' probabilities, and one."""
    return 1 + synthetic_tree(shape, best).logprob.exp().sum().item()


def chain_tau(best: list[float], tokens: int) -> float:
    return 1 + sum(reached(best)[:tokens])


def reached(best: list[float]) -> list[float]:
    """Return the probability that all first choices down to each depth are right."""
    return list(accumulate(best, mul))


def profile(model: str, tau: float) -> list[float]:
    """Return α by depth at which `PAPER_TREE` has this τ."""
    low, high = 0.01, 50.0  # τ falls with the power
    if not tree_tau(line(model, high), PAPER_TREE) < tau < tree_tau(line(model, low), PAPER_TREE):
        raise SystemExit(f"--tau is {tau:g}, but trees of 8 levels give between 1 and 9.")
    for _ in range(40):
        middle = (low + high) / 2
        if tree_tau(line(model, middle), PAPER_TREE) > tau:
            low = middle
        else:
            high = middle
    return line(model, low)


def imposed(best: list[float], tokens: int) -> dict[str, Any]:
    """Keys of `speculative_config` for drafts of `tokens` tokens or nodes."""
    rates = (reached(best) + [0.0] * tokens)[:tokens]
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
