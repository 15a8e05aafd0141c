"""Policies by the names that options and tables give them."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specblock.adapt.policy.bandit import PaperBandit, PaperWithoutBandit, Schedule
from vllm_specblock.adapt.policy.gain_bandit import GainBandit
from vllm_specblock.adapt.policy.interface import (
    EVERY,
    Action,
    Always,
    Fixed,
    Frozen,
    Policy,
    Watch,
)
from vllm_specblock.train.config import TrainError

POLICIES: dict[str, Callable[[int], Policy]] = {
    "frozen": lambda seed: Frozen(),
    "watch": lambda seed: Watch(),
    "always": lambda seed: Always(),
    "full every 64": lambda seed: Fixed(Action.FULL, 64),
    "full every 8": lambda seed: Fixed(Action.FULL, 8),
    "full every 8, no gate": lambda seed: Fixed(Action.FULL, 8, gated=False),
    "heads every 8": lambda seed: Fixed(Action.HEADS, 8),
    "paper": lambda seed: PaperBandit(seed=seed),
    "paper, no bandit": lambda seed: PaperWithoutBandit(seed=seed),
    "paper, no heads": lambda seed: PaperBandit(Schedule(least=Action.FULL), seed),
    "gain": lambda seed: GainBandit(),
    "gain, no heads": lambda seed: GainBandit(Schedule(least=Action.FULL)),
}
"""By name: seed of the exploration -> a policy at its beginning."""


def make_policy(name: str, seed: int) -> Policy:
    """A policy by name.

    Raises:
        TrainError: there is none of that name.
    """
    if name not in POLICIES:
        raise TrainError(f"There is no policy {name!r}: choose one of {', '.join(POLICIES)}.")
    return POLICIES[name](seed)


def serving_policy(name: str, seed: int, largest: Action, every: int = EVERY) -> Policy:
    """A policy as `adapt` and `specblock adapt run` name it.

    Args:
        name: `gain`, `paper`, `always` (OSD), `fixed`, `watch`, or one of `POLICIES`.
        seed: of the exploration.
        largest: the largest update; `always` and `fixed` make no other.
        every: finished requests that make an update.

    Raises:
        TrainError: there is none of that name.
    """
    schedule = Schedule(buffer=every, largest=largest)
    made: dict[str, Callable[[], Policy]] = {
        "gain": lambda: GainBandit(schedule),
        "paper": lambda: PaperBandit(schedule, seed),
        "always": lambda: Always(largest, every),
        "fixed": lambda: Fixed(largest, every),
    }
    if name not in made and name not in POLICIES:
        names = list(dict.fromkeys([*made, *POLICIES]))
        raise TrainError(f"There is no policy {name!r}: choose one of {', '.join(names)}.")
    return made[name]() if name in made else POLICIES[name](seed)
