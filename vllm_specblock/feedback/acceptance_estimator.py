"""Acceptance estimator: the probability of reaching a node, by its draft score.

A score is the drafter's own probability. Its error depends on the score and on whether the target
samples, so verdicts are counted by score and kind. The estimates of a tree's nodes add up to its
expected accepted tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import Later, write_survival_triton
from vllm_specblock.triton_kernels.feedback.write_survival_numba import node_steps_numba
from vllm_specblock.triton_kernels.optional_numba import takes

BINS_PER_NAT, NUM_BINS = 4, 32
"""A bin spans a quarter nat; the last one also holds all scores below −8 nats."""

PRIOR = 4.0
"""Prior nodes of each bin, reached as often as their scores predict."""


class AcceptanceEstimator:
    """Estimates how often nodes of a score are reached; the host reads no value.

    Shapes are fixed, and the state is updated in place. `decay`: weight of a step one step later;
    the default halves it in 140 steps.
    """

    def __init__(self, device: torch.device | str, decay: float = 0.995) -> None:
        self.decay = decay
        self._seen = torch.zeros(2, 2, NUM_BINS, device=device)
        # Verified nodes of greedy and of sampling requests, and those on the accepted path.
        self.judged, self.reached = self._seen
        bins = torch.arange(NUM_BINS, device=device)
        self.believed = (-(bins + 0.5) / BINS_PER_NAT).exp()  # [32], the score of each bin
        self._later = bins[:, None] <= bins  # [j, k]: bin k is j or less confident

    def forget(self) -> None:
        """Reset everything learned."""
        self._seen.zero_()

    def learn_from(self, verified: VerifiedTrees) -> None:
        """Learn from the verdicts on a step's trees."""
        counts = verified.judged & verified.logprob.isfinite()
        kind = (verified.temperature > 0).long()[:, None]
        cell = (kind * NUM_BINS + _place(verified.logprob).long()).flatten()
        nodes = torch.stack([counts, verified.reached & counts]).flatten(1).float()
        # Sums of integers do not depend on the order; sums of decayed numbers would.
        new = self._seen.new_zeros(2, 2 * NUM_BINS).index_add_(1, cell, nodes)
        keep = torch.where(counts.any(), self.decay, 1.0)
        self._seen.mul_(keep).add_(new.view_as(self._seen))

    def rates(self) -> torch.Tensor:
        """Return how often nodes of each bin are reached, [2, 32] fp32, monotone in the score.

        Isotonic regression, by its min-max formula, keeps the expected number of tokens. Cutting
        peaks off would lose the tokens of a chain that scores less than its siblings.
        """
        sums = torch.stack([self.reached + PRIOR * self.believed, self.judged + PRIOR]).cumsum(2)
        sums = torch.nn.functional.pad(sums, (1, 0))
        found, count = sums[..., None, 1:] - sums[..., :-1, None]  # [2, j, k]: over bins j … k
        mean = torch.where(self._later, found / count, float("-inf"))
        best_from = mean.flip(2).cummax(dim=2).values.flip(2)  # [2, j, i]: over all k ≥ i
        return torch.where(self._later, best_from, float("inf")).amin(1)

    def steps(self, temperature: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """Return vLLM's confidences of R trees' nodes, [R, N] fp32.

        Their running product is the probability that a node is on the accepted path. It is monotone
        in the score `logprob` [R, N], which descends; 0 where there is no node.
        """
        place = (_place(logprob) - 0.5).clamp(0, NUM_BINS - 1)  # between bin centres
        below = place.long()
        above = (below + 1).clamp(max=NUM_BINS - 1)
        rates, kind = self.rates(), (temperature > 0).long()[:, None]
        likely = torch.lerp(rates[kind, below], rates[kind, above], place - below)
        survival = torch.where(logprob.isfinite(), likely.cummin(dim=1).values, 0.0)
        before = torch.nn.functional.pad(survival[:, :-1], (1, 0), value=1.0)
        return torch.where(before > 0, survival / before, 0.0)

    def write_survival(
        self,
        score: torch.Tensor,
        temperature: torch.Tensor,
        req_idx: torch.Tensor,
        steps: torch.Tensor,
        later: Later | None = None,
    ) -> None:
        """Write `steps` [≥ R, N] of R new trees; `score` [S, N] is by slot.

        With `later`, `steps` get the bits of `mark`.
        """
        seen = temperature, self.judged, self.reached, self.believed, PRIOR, BINS_PER_NAT
        if self.judged.is_cuda:
            write_survival_triton(req_idx, score, *seen, steps, later)
            return
        here = steps[: len(req_idx)]
        if takes(self.judged):
            node_steps_numba(*seen, score[req_idx], here)
        else:
            here.copy_(self.steps(temperature, score[req_idx]))
        if later is not None:
            deep = later.depth[req_idx, 1:] > later.first
            mark(here, deep & (later.origin[req_idx] & later.others == 0))


def mark(steps: torch.Tensor, later: torch.Tensor) -> None:
    """Set the lowest bit of `steps` [R, N] fp32 where `later` [R, N] bool holds, else clear it.

    One copy then takes both to the host. A marked 1 becomes the next lower number.
    """
    bits = steps.view(torch.int32)
    bits.bitwise_and_(-2).sub_((later & (steps > 0)).int())


def marked(steps: np.ndarray) -> np.ndarray:
    """Return the nodes that `mark` marked, [R, N] bool, from [R, N] fp32."""
    return (steps.view(np.int32) & 1).astype(bool)


def _place(logprob: torch.Tensor) -> torch.Tensor:
    """Return bin coordinates [...] fp32 in 0 … 32; 0 is the most confident."""
    return (-BINS_PER_NAT * logprob).clamp(0, NUM_BINS - 1e-3)
