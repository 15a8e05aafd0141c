"""Acceptance estimator: the probability of reaching a node, by its draft score.

A score is the drafter's own probability. Its error depends on the score and on whether the target
samples, so verdicts are counted by score and kind. The estimates of a tree's nodes add up to its
expected accepted tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import SeenNodes, write_survival_triton
from vllm_specblock.triton_kernels.feedback.write_survival_numba import write_survival_numba
from vllm_specblock.triton_kernels.op import op

write_survival = op(write_survival_triton)(write_survival_numba)

BINS_PER_NAT, NUM_BINS = 4, 32
"""A bin spans a quarter nat; the last one also holds all scores below −8 nats."""

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
        counts = verified.judged & verified.logprob.isfinite()
        kind = (verified.temperature > 0).long()[:, None]
        place = (-BINS_PER_NAT * verified.logprob).clamp(0, NUM_BINS - 1e-3)  # 0: most confident
        cell = (kind * NUM_BINS + place.long()).flatten()
        nodes = torch.stack([counts, verified.reached & counts]).flatten(1).float()
        # Sums of integers do not depend on the order; sums of decayed numbers would.
        new = self._seen.new_zeros(2, 2 * NUM_BINS).index_add_(1, cell, nodes)
        keep = torch.where(counts.any(), self.decay, 1.0)
        self._seen.mul_(keep).add_(new.view_as(self._seen))


def marked(steps: np.ndarray) -> np.ndarray:
    """Return the nodes that are marked as `later`, [R, N] bool, from [R, N] fp32."""
    return (steps.view(np.int32) & 1).astype(bool)
