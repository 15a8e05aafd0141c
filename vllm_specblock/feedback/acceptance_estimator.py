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
"""Scores of a quarter nat share a bin, and all those below −8 nats."""

KINDS = 2  # see `kinds`
PRIOR = 4.0
"""Prior nodes of each bin, reached as often as their scores say."""


class AcceptanceEstimator:
    """Estimates how often nodes of a score are reached; the host reads no value.

    Shapes are fixed, and the state is updated in place.

    Attributes:
        judged: [2, 32] fp32, verified nodes by kind and bin.
        reached: [2, 32] fp32, those on the accepted path.
        believed: [32] fp32, the score of each bin.

    Args:
        decay: weight of a step one step later. The default forgets half in 140 steps.
    """

    def __init__(self, device: torch.device | str, decay: float = 0.995) -> None:
        self.decay = decay
        self.judged = torch.zeros(KINDS, NUM_BINS, device=device)
        self.reached = torch.zeros(KINDS, NUM_BINS, device=device)
        bins = torch.arange(NUM_BINS, device=device)
        self.believed = (-(bins + 0.5) / BINS_PER_NAT).exp()
        self._later = bins[:, None] <= bins  # [j, k]: bin k is j or less confident

    def forget(self) -> None:
        """Reset everything learned."""
        self.judged.zero_()
        self.reached.zero_()

    def learn_from(self, verified: VerifiedTrees) -> None:
        """Learn from the verdicts on a step's trees."""
        kind = kinds(verified.temperature)
        self.learn(kind, verified.logprob, verified.reached, verified.judged)

    def learn(
        self, kind: torch.Tensor, logprob: torch.Tensor, reached: torch.Tensor, judged: torch.Tensor
    ) -> None:
        """Learn from verdicts.

        Args:
            kind: [R] int64.
            logprob: [R, N] fp32, cumulative draft log-scores in nats, −inf where there is no node.
            reached: [R, N] bool, nodes on the accepted path.
            judged: [R, N] bool, verified nodes; the others do not count.
        """
        counts = judged & logprob.isfinite()
        cell = (kind[:, None] * NUM_BINS + _place(logprob).long()).flatten()
        keep = torch.where(counts.any(), self.decay, 1.0)
        for total, values in (self.judged, counts), (self.reached, reached & counts):
            # Integers add up to the same in any order, decayed numbers would not.
            new = torch.zeros_like(total).view(-1).index_add_(0, cell, values.float().flatten())
            total.mul_(keep).add_(new.view_as(total))

    def rates(self) -> torch.Tensor:
        """Return how often nodes of each bin are reached, [2, 32] fp32, monotone in the score.

        Isotonic regression, by its min-max formula, keeps the expected number of tokens. Cutting
        peaks off would lose the tokens of a chain that scores less than its siblings.
        """
        count = torch.nn.functional.pad((self.judged + PRIOR).cumsum(1), (1, 0))
        found = self.reached + PRIOR * self.believed
        found = torch.nn.functional.pad(found.cumsum(1), (1, 0))
        # [2, j, k]: the mean over bins j … k.
        mean = (found[:, None, 1:] - found[:, :-1, None]) / (
            count[:, None, 1:] - count[:, :-1, None]
        )
        mean = torch.where(self._later, mean, float("-inf"))
        best_from = mean.flip(2).cummax(dim=2).values.flip(2)  # [2, j, i]: over all k ≥ i
        return torch.where(self._later, best_from, float("inf")).amin(1)

    def survival(self, kind: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """Return the probability that each node is on the accepted path, monotone in the score.

        Args:
            kind: [R] int64.
            logprob: [R, N] fp32, descending.

        Returns:
            [R, N] fp32; 0 where there is no node.
        """
        place = (_place(logprob) - 0.5).clamp(0, NUM_BINS - 1)  # between bin centres
        below = place.long()
        above = (below + 1).clamp(max=NUM_BINS - 1)
        rates, kind = self.rates(), kind[:, None]
        likely = torch.lerp(rates[kind, below], rates[kind, above], place - below)
        return torch.where(logprob.isfinite(), likely.cummin(dim=1).values, 0.0)

    def steps(self, kind: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """Return `survival` as vLLM's confidences, whose running product it is, [R, N] fp32."""
        survival = self.survival(kind, logprob)
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
        """Write `steps` of new trees, with the bits of `mark` if there are later blocks.

        Args:
            score: [S, N] fp32, by slot.
            temperature: [R] fp32.
            req_idx: [R] integers.
            steps: [≥ R, N] fp32; the first R rows are written.
        """
        seen = temperature, self.judged, self.reached, self.believed, PRIOR, BINS_PER_NAT
        if self.judged.is_cuda:
            write_survival_triton(req_idx, score, *seen, steps, later)
            return
        here = steps[: len(req_idx)]
        if takes(self.judged):
            node_steps_numba(*seen, score[req_idx], here)
        else:
            here.copy_(self.steps(kinds(temperature), score[req_idx]))
        if later is not None:
            deep = later.depth[req_idx, 1:] > later.first
            mark(here, deep & (later.origin[req_idx] & later.others == 0))


def kinds(temperature: torch.Tensor) -> torch.Tensor:
    """Return [R] int64: 0 for requests at temperature 0, 1 for those that sample."""
    return (temperature > 0).long()


def mark(steps: torch.Tensor, later: torch.Tensor) -> None:
    """Set the lowest bit of `steps` [R, N] fp32 where `later` [R, N] bool holds, else clear it.

    So the host gets both in one copy. A marked 1 becomes the number below it.
    """
    bits = steps.view(torch.int32)
    bits.bitwise_and_(-2).sub_((later & (steps > 0)).int())


def marked(steps: np.ndarray) -> np.ndarray:
    """Return the nodes that `mark` marked, [R, N] bool, from [R, N] fp32."""
    return (steps.view(np.int32) & 1).astype(bool)


def _place(logprob: torch.Tensor) -> torch.Tensor:
    """Return bin coordinates [...] fp32 in 0 … 32; 0 is the most confident."""
    return (-BINS_PER_NAT * logprob).clamp(0, NUM_BINS - 1e-3)
