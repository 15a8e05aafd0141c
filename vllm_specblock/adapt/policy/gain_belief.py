"""What updates of each arm are believed to gain, after noisy observations of some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_specblock.adapt.policy.interface import Action

SPREAD = 0.05
"""Prior spread of what a full update gains, Δτ / τ per missed step: some hundredths behind a change
of domain on the example pair, nothing at home."""

SIZE = {Action.HEADS: 0.5, Action.FULL: 1.0}
"""Gains in proportion: of a full update's, heads brought between 35 and 66 %."""

TOGETHER = 0.95
"""Correlation of what both arms gain."""

LUCK = 0.02
"""Standard deviation of an update's gain around that of its arm, per missed step."""


class GainBelief:
    """A normal belief about v of all arms together, and Kalman's update of it.

    The arms' gains go together, so an observation of one is evidence of the other.

    Attributes:
        mean: of v, by arm.
    """

    def __init__(self, arms: Sequence[Action]) -> None:
        self.arms = tuple(arms)
        self.reset()

    def reset(self) -> None:
        self.mean = dict.fromkeys(self.arms, 0.0)
        self._covariance = {(a, b): _prior(a, b) for a in self.arms for b in self.arms}

    def spread(self, arm: Action) -> float:
        """Standard deviation of v."""
        return math.sqrt(self._covariance[arm, arm])

    def forget(self, share: float) -> None:
        """Move the belief towards the prior by a share."""
        for arm in self.arms:
            self.mean[arm] -= share * self.mean[arm]
        for pair, value in self._covariance.items():
            self._covariance[pair] = value + share * (_prior(*pair) - value)

    def learn(self, arm: Action, gain: float, error: float) -> None:
        """Add one observation of an arm.

        Args:
            gain: per missed step.
            error: its standard error; NaN: unknown.
        """
        before = dict(self._covariance)
        noise = LUCK**2 + (_prior(arm, arm) if math.isnan(error) else error**2)
        weight = {a: before[a, arm] / (before[arm, arm] + noise) for a in self.arms}
        surprise = gain - self.mean[arm]
        for a in self.arms:
            self.mean[a] += weight[a] * surprise
        for a, b in before:
            self._covariance[a, b] = before[a, b] - weight[a] * before[arm, b]


def _prior(one: Action, other: Action) -> float:
    """Covariance."""
    return SPREAD**2 * SIZE[one] * SIZE[other] * (1.0 if one is other else TOGETHER)
