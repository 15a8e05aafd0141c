"""Evidence, request by request, that one version is better than another, or that τ fell.

Both are valid whenever one looks: nobody has to say beforehand after how many requests to decide.
"""

from __future__ import annotations

import math
from statistics import fmean

LEAST_SPREAD = 0.05
"""Tokens per step; τ of some equal requests is no reason to take every later difference for a
fall."""

SWITCH, GOOD = 1000.0, 20.0
"""Wealth at which the engine takes another version, and at which the current one is called good."""


STAKES = ((0.15, 0.5), (0.075, 0.9))
"""(share of a usual text's steps at which a difference counts in full, share of the wealth that is
staked then): the careful bettor finds small losses among large spreads, the bold one has more than
half of its wealth on a difference that most texts agree on."""


class BettingEvidence:
    """An e-detector (arXiv 2203.03532) for "the other version is better".

    Each of `STAKES` bets on the sign of paired differences: wealth ← max(wealth, 1) · (1 − stake ·
    clip(d / scale, −1, 1)). While the mean of the clipped d is not negative, each factor is at most
    1 on average: so the wealth, the bettors' mean, is at `threshold` once in `threshold`
    differences at most, on average.

    Args:
        threshold: of the wealth.
    """

    def __init__(self, threshold: float = SWITCH) -> None:
        self.threshold = threshold
        self._wealths: list[float] = []
        self.reset()

    @property
    def wealth(self) -> float:
        """1 in the beginning."""
        return fmean(self._wealths)

    def add(self, difference: float) -> bool:
        """Whether the evidence suffices after one more paired difference.

        Args:
            difference: d = what this version saves against the other on one request's text, as a
                share of the steps of a usual one. NaN is no evidence.
        """
        if not math.isnan(difference):
            self._wealths = [
                max(wealth, 1.0) * (1 - stake * min(1.0, max(-1.0, difference / scale)))
                for wealth, (scale, stake) in zip(self._wealths, STAKES)
            ]
        return self.wealth >= self.threshold

    def reset(self) -> None:
        """Begin anew, with another version on either side."""
        self._wealths = [1.0] * len(STAKES)


class FallDetector:
    """CUSUM of each request's τ against mean and spread since the swap: the live trip.

    It sees what judging on recorded text cannot: keys and values that older weights wrote, or
    quantisation. Each request's τ is held against those before it, so that a fall does not hide
    itself by pulling the mean down at once.

    Args:
        threshold: standard deviations.
        slack: standard deviations that each request may lie below the mean for free; without it
            the sum of mere noise passes any threshold within some dozen requests.
        learn: requests that mean and spread are learned from before anything is said.

    Attributes:
        excess: the sum, standard deviations; 0 or more.
    """

    def __init__(self, threshold: float = 8.0, slack: float = 0.5, learn: int = 16) -> None:
        self.threshold, self.slack, self.learn = threshold, slack, learn
        self.reset()

    def reset(self) -> None:
        """Begin anew: after a swap."""
        self.excess, self._count, self._mean, self._squares = 0.0, 0, 0.0, 0.0

    def add(self, tau: float) -> bool:
        """Whether τ has fallen, after one more request's τ (tokens per step)."""
        if self._count >= self.learn:
            spread = math.sqrt(self._squares / (self._count - 1))
            below = (self._mean - tau) / max(spread, LEAST_SPREAD)
            self.excess = max(0.0, self.excess + below - self.slack)
        self._count += 1
        away = tau - self._mean
        self._mean += away / self._count
        self._squares += away * (tau - self._mean)
        return self.excess > self.threshold
