"""Online calibration of draft scores (temperature scaling).

Trees grow by the estimated probability of reaching a node. Drafters learn the target's whole
distribution, but a greedy target always takes the likeliest token. Scores that are too flat waste
nodes on siblings, scores that are too sharp on a chain that ends early. So draft logits are scaled
by β, an inverse temperature.
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
"""Initial β for requests at temperature 0, and β times the temperature for the others."""

RANGE = (0.25, 4.0)
"""Bounds of β, or of β times the temperature."""

PRIOR, MEMORY = 20.0, 500.0
"""Prior trees, and trees of the moving average."""

OWN_PRIOR, OWN_MEMORY = 10.0, 50.0
"""The same for one request."""

OWN_RANGE = 4.0
"""Largest factor between β of one request and of all requests, in either direction."""


class DraftCalibration:
    """β of one drafter for each request, by its sampling temperature.

    A target at temperature t samples its distribution to the power of 1/t, so β is c/t, at most a
    greedy target's. Stochastic approximation on log β learns c and the greedy β, so that a tree's
    scores add up to its accepted tokens. The error of a tree is relative to its expected tokens.
    The output does not depend on β.

    Each request also learns its own factor. This matters if two drafters are compared by their
    scores: one may be accurate on earlier texts, but not on this one.

    Shapes are fixed, the state is updated in place, and the host reads no value.

    Attributes:
        log: [2] fp32, log β at temperature 0, log c.
        trees: [2] fp32, trees behind each, at most `MEMORY`.
        own: [S] fp32, log of each request's own factor, by slot.
        own_trees: [S] fp32, trees behind it, at most `OWN_MEMORY`.

    Args:
        num_slots: S; 0: no factors per request.
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
        """Reset the factor of a slot for a new request."""
        for state in (self.own, self.own_trees):
            state[req_idx : req_idx + 1].zero_()

    def of(self, temperature: torch.Tensor, req_idx: torch.Tensor | None = None) -> torch.Tensor:
        """Return β of requests, [R] fp32.

        Args:
            temperature: [R] fp32; 0: greedy.
            req_idx: [R] integers; None: new requests.
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
        """Return the kernel's learning rates and bounds."""
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
            expected: fp32, the sum of exp(logprob) over verified nodes.
            accepted: integers, accepted nodes.
            live: bool; other values are ignored.
            req_idx: integers, the request of each tree; None: update only the shared factor.
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
