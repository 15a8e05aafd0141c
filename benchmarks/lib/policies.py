"""Policies that simulations compare: those of serving, fixed ones, and the papers' ablations."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.gain_bandit import GainBandit
from vllm_specblock.adapt.policy.interface import (
    EVERY,
    Action,
    Always,
    Decision,
    FinishedRequest,
    Policy,
)


class Frozen(Policy):
    """Learns nothing."""

    def decide(self, request: FinishedRequest) -> Decision:
        return Decision(Action.SKIP)


class Fixed(Always):
    """One arm, every so many requests, on all positions; `gated`: see `Policy`."""

    rejected_only = False

    def __init__(
        self, action: Action = Action.FULL, every: int = EVERY, gated: bool = True
    ) -> None:
        super().__init__(action, every)
        self.gated = gated


class PaperWithoutBandit(PaperBandit):
    """Table 2's row "w/o cost-aware bandit": every update is of all weights."""

    def choose(self, request: FinishedRequest) -> Action:
        return Action.SKIP if self._seen <= self.schedule.warm_up else Action.FULL


POLICIES: dict[str, Callable[[int], Policy]] = {
    "frozen": lambda seed: Frozen(),
    "always": lambda seed: Always(),
    "full every 8": lambda seed: Fixed(Action.FULL, 8),
    "full every 8, no gate": lambda seed: Fixed(Action.FULL, 8, gated=False),
    "heads every 8": lambda seed: Fixed(Action.HEADS, 8),
    "paper": lambda seed: PaperBandit(None, seed),
    "paper, no bandit": lambda seed: PaperWithoutBandit(seed=seed),
    "paper, no heads": lambda seed: PaperBandit(Schedule(least=Action.FULL), seed),
    "gain": lambda seed: GainBandit(),
    "gain, no heads": lambda seed: GainBandit(Schedule(least=Action.FULL)),
}
"""By name: seed of the exploration -> a policy at its beginning."""
