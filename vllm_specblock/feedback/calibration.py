"""Online calibration of draft scores (temperature scaling).

Trees grow by the estimated probability of reaching a node. Scores that are too flat waste nodes on
siblings; scores that are too sharp waste them on a chain that ends early. Therefore draft logits
are scaled by β, an inverse temperature: a greedy target always takes the likeliest token.
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

RATES = LearnRates(
    lowest=math.log(0.25),
    highest=math.log(4.0),
    prior=20.0,
    memory=500.0,
    own_most=math.log(4.0),
    own_prior=10.0,
    own_memory=50.0,
)


class DraftCalibration:
    """β of one drafter for each request, by its sampling temperature.

    A target at temperature t samples its distribution to the power of 1/t, so β is c/t, at most a
    greedy target's. Stochastic approximation on log β learns c and the greedy β, so that a tree's
    scores add up to its accepted tokens. The error of a tree is relative to its expected tokens.
    The output does not depend on β.

    Each request also has its own factor. This matters if two drafters are compared by their
    scores: one may be accurate on earlier texts, but not on this one. `num_slots`: S; 0: no factors
    per request.

    Shapes are fixed, the state is updated in place, and the host reads no value.
    """

    def __init__(self, device: torch.device | str, num_slots: int = 0) -> None:
        self.rates = RATES
        self._start = torch.tensor([GREEDY, SAMPLING], device=device).log()
        self.log = self._start.clone()  # [2] fp32, log β at temperature 0, log c
        self.trees = torch.zeros(2, device=device)  # trees that each was learned from
        self.make_room(num_slots)

    def make_room(self, num_slots: int) -> None:
        """Allocate S empty request slots."""
        self.own = torch.zeros(num_slots, device=self.log.device)  # log of a request's own factor
        self.own_trees = torch.zeros_like(self.own)  # trees that it was learned from

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
        """Return β of R requests, fp32, by temperature and slot; req_idx None: new requests."""
        if not len(self.own):
            req_idx = None
        greedy, sampling = self.log.exp().unbind()
        usual = torch.minimum(greedy, sampling / temperature)  # infinite at temperature 0
        return usual if req_idx is None else usual * self.own[req_idx].exp()

    def learn_from(self, verified: VerifiedTrees, drafter: int) -> torch.Tensor:
        """Learn from the nodes of a drafter (0 or 1); return β of the requests, [R] fp32."""
        if self.log.is_cuda:
            return update_calibration_triton(
                self.log, self.trees, self.own, self.own_trees, drafter, verified, self.rates
            )
        temperature, req_idx = verified.temperature, verified.req_idx
        self.learn(temperature, *verified.of_drafter(drafter), req_idx)
        return self.of(temperature, req_idx)

    def learn(
        self,
        temperature: torch.Tensor,  # fp32
        expected: torch.Tensor,  # fp32, the sum of exp(logprob) over verified nodes
        accepted: torch.Tensor,  # integers, accepted nodes
        live: torch.Tensor,  # bool; other values are ignored
        req_idx: torch.Tensor | None = None,  # integers; None: update only the shared factor
    ) -> None:
        """Learn from R verified trees."""
        rates, (greedy, sampling) = self.rates, self.log.exp().unbind()
        is_greedy = greedy * temperature <= sampling  # where `of` returns `greedy`
        decides = torch.stack([is_greedy, ~is_greedy], 1) & live[:, None]
        error = torch.where(live, (accepted - expected) / (1 + expected), 0)
        pull = (error[:, None] * decides).sum(0)
        self.trees.add_(decides.sum(0)).clamp_(max=rates.memory)
        self.log.add_(pull / (rates.prior + self.trees)).clamp_(rates.lowest, rates.highest)
        if req_idx is not None and len(self.own):
            count = (self.own_trees[req_idx] + live).clamp(max=rates.own_memory)
            own = self.own[req_idx] + error / (rates.own_prior + count)
            self.own_trees[req_idx] = count
            self.own[req_idx] = own.clamp(-rates.own_most, rates.own_most)
