"""Drafter of synthetic acceptance: for benchmarks on random weights only.

It drafts at full cost, and its tree is replaced by the one that the imposed probabilities α grow;
`verify/synthetic_acceptance.py` accepts with these probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.tree import DraftTree

SECOND = 0.3
"""Share of the remaining probability that each next rank takes, about as the example drafter's
(`benchmarks/results/rank_and_scores.md`)."""


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
    """What `shape` grows where every distribution is the imposed one; R = 1, on the CPU.

    Every position has the widest bucket's children: the cut by score alone says what stays.

    Args:
        best: α by depth; no tree is deeper than it has nodes, so N of them always do.
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
    expansion.first_block(*(each[:, 0] for each in distributions(depth)))
    for block in range(2, shape.num_blocks + 1):
        starts = expansion.starts(block)
        reach = depth.gather(1, starts.row) + starts.position + 1  # [1, S]
        expansion.next_block(starts, block, *distributions(reach))
        depth = torch.cat([depth, reach.view(1, S)], 1)
    return expansion.finish()


class SyntheticDrafter(SpecBlockDrafter):
    """Drafts as `drafter` does, and returns the imposed tree with the drafted tokens.

    Args:
        drafter: what drafts; it learns nothing from trees that are not its own.
        best: α by depth, as `synthetic_tree`.
        device: of its trees.
    """

    def __init__(
        self, drafter: SpecBlockDrafter, best: Sequence[float], device: torch.device
    ) -> None:
        vars(self).update(vars(drafter))
        self.calibration = None
        fields = vars(synthetic_tree(drafter.shape, best))
        self.tree = {name: value.to(device) for name, value in fields.items()}

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        token = super().draft(requests).token
        fields = {
            name: value.expand(len(token), *value.shape[1:]) for name, value in self.tree.items()
        }
        return DraftTree(**(fields | {"token": token}))
