"""Online calibration of draft scores (temperature scaling).

Trees are grown and cut by the probability that the target comes by a node. Drafters learn the
target's whole distribution, but a greedy target always takes the likeliest token. Scores that are
too flat spend nodes on siblings, scores that are too sharp on a chain that ends early. So logits
are multiplied by an exponent β, the inverse of a temperature, before they become scores.
"""

from __future__ import annotations

import math

import torch

from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.calibrate_drafts import (
    LearnRates,
    update_calibration_triton,
)

GREEDY, SAMPLING = 1.5, 1.0
"""Where β starts: for requests at temperature 0, and times the temperature for the others."""

RANGE = (0.25, 4.0)
"""β, or β times the temperature, stays within."""

PRIOR, MEMORY = 20.0, 500.0
"""Trees that count before any was seen, and trees that later ones are averaged over."""

OWN_PRIOR, OWN_MEMORY = 10.0, 50.0
"""The same for one request."""

OWN_RANGE = 4.0
"""Largest factor between β of a request and that of all requests, either way."""


class DraftCalibration:
    """β of one drafter, for every request by its sampling temperature.

    A target at temperature t samples its distribution to the power of 1/t, so β is c/t, and never
    more than a greedy target's. Both c and the greedy target's β are learned by stochastic
    approximation on log β, so that a tree's scores add up to its accepted tokens. A tree's error is
    in tokens, over the tokens that it was expected to yield. The output does not depend on β.

    The same errors teach each request a factor of its own. It matters where two drafters are
    compared by their scores: one that was right on earlier texts may know nothing of this one.

    All shapes are fixed, the state is changed in place, and no value is read on the host.

    Attributes:
        log: [2] fp32, log β at temperature 0, log c.
        trees: [2] fp32, trees that each was learned from, `MEMORY` at most.
        own: [S] fp32, log of the factor of the request in each of S slots.
        own_trees: [S] fp32, trees that it was learned from, `OWN_MEMORY` at most.

    Args:
        num_slots: S; 0: requests are not told apart.
    """

    def __init__(self, device: torch.device | str, num_slots: int = 0) -> None:
        self._start = torch.tensor([GREEDY, SAMPLING], device=device).log()
        self._limits = math.log(RANGE[0]), math.log(RANGE[1])
        self.log = self._start.clone()
        self.trees = torch.zeros(2, device=device)
        self.make_room(num_slots)

    def make_room(self, num_slots: int) -> None:
        """Allocate S empty request slots."""
        self.own = torch.zeros(num_slots, device=self.log.device)
        self.own_trees = torch.zeros_like(self.own)

    def forget(self) -> None:
        """Reset everything learned."""
        self.log.copy_(self._start)
        for state in (self.trees, self.own, self.own_trees):
            state.zero_()

    def begin(self, req_idx: int) -> None:
        """Reset what was learned of the request in a slot."""
        for state in (self.own, self.own_trees):
            state[req_idx : req_idx + 1].zero_()

    def of(self, temperature: torch.Tensor, req_idx: torch.Tensor | None = None) -> torch.Tensor:
        """β of requests, [R] fp32.

        Args:
            temperature: [R] fp32; 0: greedy.
            req_idx: [R] integers; None: requests of which nothing is known.
        """
        if not len(self.own):
            req_idx = None
        greedy, sampling = self.log.exp().unbind()
        usual = torch.minimum(greedy, sampling / temperature)  # infinite at temperature 0
        return usual if req_idx is None else usual * self.own[req_idx].exp()

    def learn_from(self, verified: VerifiedTrees, drafter: int) -> torch.Tensor:
        """Learn from the verdicts on a step's trees, by the nodes of a drafter (0 or 1).

        Returns:
            [R] fp32, β of the step's requests.
        """
        if self.log.is_cuda:
            return update_calibration_triton(
                self.log, self.trees, self.own, self.own_trees, drafter, verified, self.rates()
            )
        temperature, req_idx = verified.temperature, verified.req_idx
        self.learn(temperature, *verified.of_drafter(drafter), req_idx)
        return self.of(temperature, req_idx)

    def rates(self) -> LearnRates:
        """Return how fast and how far the kernel learns."""
        own = math.log(OWN_RANGE), OWN_PRIOR, OWN_MEMORY
        return LearnRates(*self._limits, PRIOR, MEMORY, *own)

    def learn(
        self,
        temperature: torch.Tensor,
        expected: torch.Tensor,
        accepted: torch.Tensor,
        live: torch.Tensor,
        req_idx: torch.Tensor | None = None,
    ) -> None:
        """Learn from verified trees.

        Args (each [R]):
            temperature: fp32.
            expected: fp32, the sum of exp(logprob) over the nodes that the target ran on.
            accepted: integers, how many of these nodes were accepted.
            live: bool; values of the others are ignored.
            req_idx: integers, the request of each tree; None: only all requests' factor learns.
        """
        greedy, sampling = self.log.exp().unbind()
        is_greedy = greedy * temperature <= sampling  # it is `greedy` that `of` gives
        decides = torch.stack([is_greedy, ~is_greedy], 1) & live[:, None]
        error = torch.where(live, (accepted - expected) / (1 + expected), 0)
        pull = (error[:, None] * decides).sum(0)
        self.trees.add_(decides.sum(0)).clamp_(max=MEMORY)
        self.log.add_(pull / (PRIOR + self.trees)).clamp_(*self._limits)
        if req_idx is not None and len(self.own):
            most = math.log(OWN_RANGE)
            count = (self.own_trees[req_idx] + live).clamp(max=OWN_MEMORY)
            own = self.own[req_idx] + error / (OWN_PRIOR + count)
            self.own_trees[req_idx], self.own[req_idx] = count, own.clamp(-most, most)
