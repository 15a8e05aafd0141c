"""Policies by the names of `adapt` and `specblock adapt run`."""

from __future__ import annotations

from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.gain_bandit import GainBandit
from vllm_specblock.adapt.policy.interface import EVERY, Action, Always, Policy
from vllm_specblock.train.config import TrainError


def make_policy(
    name: str, seed: int = 0, largest: Action = Action.FULL, every: int = EVERY
) -> Policy:
    """Return a new policy.

    Args:
        largest: the largest update; `always` makes only these.
        every: finished requests per update.

    Raises:
        TrainError: there is none of that name.
    """
    schedule = Schedule(buffer=every, largest=largest)
    match name:
        case "gain":
            return GainBandit(schedule)
        case "paper":
            return PaperBandit(schedule, seed)
        case "always":
            return Always(largest, every)
    raise TrainError(f"There is no policy {name!r}: choose one of gain, paper, always.")
