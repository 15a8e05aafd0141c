"""What updates of each arm are believed to gain, after noisy observations of some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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
        sizes = SPREAD * np.array([SIZE[arm] for arm in self.arms])
        alike = TOGETHER + (1 - TOGETHER) * np.eye(len(self.arms))
        self._prior = np.outer(sizes, sizes) * alike
        self.reset()

    def reset(self) -> None:
        self.mean = dict.fromkeys(self.arms, 0.0)
        self._covariance = self._prior.copy()

    def spread(self, arm: Action) -> float:
        """Standard deviation of v."""
        index = self.arms.index(arm)
        return math.sqrt(self._covariance[index, index])

    def forget(self, share: float) -> None:
        """Move the belief towards the prior by a share."""
        self.mean = {arm: (1 - share) * mean for arm, mean in self.mean.items()}
        self._covariance += share * (self._prior - self._covariance)

    def learn(self, arm: Action, gain: float, error: float) -> None:
        """Add one observation of an arm.

        Args:
            gain: per missed step.
            error: its standard error; NaN: unknown.
        """
        index = self.arms.index(arm)
        noise = LUCK**2 + (self._prior[index, index] if math.isnan(error) else error**2)
        with_arm = self._covariance[index]
        weight = with_arm / (with_arm[index] + noise)
        surprise = gain - self.mean[arm]
        self.mean = {a: self.mean[a] + float(w) * surprise for a, w in zip(self.arms, weight)}
        self._covariance = self._covariance - np.outer(weight, with_arm)
