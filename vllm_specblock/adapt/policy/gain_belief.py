"""Gaussian belief in the gains of each arm's updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_specblock.adapt.policy.interface import Action

SPREAD = 0.05
"""Prior spread of a full update's gain, Δτ / τ per missed step: some hundredths in a new domain of
the example pair, none at home."""

SIZE = {Action.HEADS: 0.5, Action.FULL: 1.0}
"""Prior gains relative to a full update; measured for heads: 35 to 66 %."""

TOGETHER = 0.95
"""Correlation of both arms' gains."""

LUCK = 0.02
"""Standard deviation of an update's gain around its arm's, per missed step."""


class GainBelief:
    """Joint normal belief in v of all arms, with Kalman updates.

    The arms' gains are correlated, so an observation of one informs the other.

    Attributes:
        mean: mean of v by arm.
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
            gain: gain per missed step.
            error: its standard error; NaN: unknown.
        """
        index = self.arms.index(arm)
        noise = LUCK**2 + (self._prior[index, index] if math.isnan(error) else error**2)
        with_arm = self._covariance[index]
        weight = with_arm / (with_arm[index] + noise)
        surprise = gain - self.mean[arm]
        self.mean = {a: self.mean[a] + float(w) * surprise for a, w in zip(self.arms, weight)}
        self._covariance = self._covariance - np.outer(weight, with_arm)
