"""Policies by the names that options and tables give them."""

from __future__ import annotations

from collections.abc import Callable

from vllm_specblock.adapt.bandit import GainBandit, PaperBandit
from vllm_specblock.adapt.policy import Action, Always, Fixed, Frozen, Policy, Watch
from vllm_specblock.train.config import TrainError

POLICIES: dict[str, Callable[[int], Policy]] = {
    "frozen": lambda seed: Frozen(),
    "watch": lambda seed: Watch(),
    "always": lambda seed: Always(),
    "full every 64": lambda seed: Fixed(Action.FULL, 64),
    "full every 8": lambda seed: Fixed(Action.FULL, 8),
    "heads every 8": lambda seed: Fixed(Action.HEADS, 8),
    "paper": lambda seed: PaperBandit(seed=seed),
    "gain": lambda seed: GainBandit(seed=seed),
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
