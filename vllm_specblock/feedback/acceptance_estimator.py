"""Acceptance estimator: the probability of reaching a node, by its draft score.

A score is the drafter's own probability. Its error depends on the score and on whether the target
samples, so verdicts are counted by score and kind. The estimates of a tree's nodes add up to its
expected accepted tokens.
"""

from __future__ import annotations

import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import SeenNodes, write_survival_triton
from vllm_specblock.triton_kernels.feedback.write_survival_numba import (
    BINS_PER_NAT,
    write_survival_numba,
)
from vllm_specblock.triton_kernels.op import Op, op

write_survival = op(write_survival_triton)(write_survival_numba)

NUM_BINS = 32
"""The last one also holds all scores below −8 nats."""

PRIOR = 4.0
"""Prior nodes of each bin, reached as often as their scores predict."""


class AcceptanceEstimator:
    """Estimates how often nodes of a score are reached; the host reads no value.

    Shapes are fixed, and the state is updated in place.
    """

    decay = 0.995  # weight of a step one step later: half in 140 steps

    def __init__(self, device: torch.device | str) -> None:
        self._seen = torch.zeros(2, 2, NUM_BINS, device=device)
        judged, reached = self._seen
        bins = torch.arange(NUM_BINS, device=device)
        believed = (-(bins + 0.5) / BINS_PER_NAT).exp()  # the score of each bin
        self.seen = SeenNodes(judged, reached, believed, PRIOR, BINS_PER_NAT)

    def forget(self) -> None:
        """Reset everything learned."""
        self._seen.zero_()

    def learn_from(self, verified: VerifiedTrees) -> None:
        """Learn from the verdicts on a step's trees."""
        learn_scores(self._seen, verified, self.decay)


@Op
def learn_scores(seen: torch.Tensor, verified: VerifiedTrees, decay: float) -> None:
    """Add the verdicts to `seen`, [2, 2, bins] fp32: verified and reached nodes, greedy and not."""
    counts = verified.judged & (verified.logprob > float("-inf"))  # not NaN, either
    score = torch.where(counts, verified.logprob, 0)
    kind = (verified.temperature > 0).long()[:, None]
    place = (-BINS_PER_NAT * score).clamp(0, NUM_BINS - 1e-3)  # 0: most confident
    cell = (kind * NUM_BINS + place.long()).flatten()
    nodes = torch.stack([counts, verified.reached & counts]).flatten(1).float()
    # Sums of integers do not depend on the order; sums of decayed numbers would.
    new = seen.new_zeros(2, 2 * NUM_BINS).index_add_(1, cell, nodes)
    keep = torch.where(counts.any(), decay, 1.0)
    seen.mul_(keep).add_(new.view_as(seen))
