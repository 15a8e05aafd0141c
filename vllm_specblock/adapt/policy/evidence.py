"""Statistics of a stream of requests: the usual τ, and sequential tests of versions and of τ.

The tests are valid after every request.
"""

from __future__ import annotations

import math
from statistics import fmean

LEAST_SPREAD = 0.05
"""Minimum spread in tokens per step, so that equal requests do not make any difference a fall."""

FALLEN, SLACK, LEARN = 8.0, 0.5, 16
"""Limit of the summed fall of τ, and the fall of a request that does not count, in standard
deviations; requests for the first mean and spread."""

SWITCH, GOOD = 1000.0, 20.0
"""Wealth at which another version replaces the current one, and at which that is called good."""

STAKES = ((0.15, 0.5), (0.075, 0.9))
"""(difference of a full bet, as a share of the usual steps; share of the wealth staked then): the
careful bettor finds small losses in noisy texts, the bold one consistent differences."""

SLOW = 1 / 256
"""Weight of a request in the usual τ, after a plain mean of the first 256: slow, so that texts of a
new domain stay hard until most of it is learned."""


class SlowMean:
    """Plain mean of the first 1 / `weight` values, then an EWMA.

    Attributes:
        value: 0 before the first.
        count: number of values.
    """

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.count = weight, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


class Usual(SlowMean):
    """The usual τ of a stream, and whether a request is hard in comparison.

    In one domain half of the texts are hard; in a mix, those that the drafter knows less.
    """

    def __init__(self) -> None:
        super().__init__(SLOW)

    def is_hard(self, tau: float) -> bool:
        """Return whether a request's τ is at most the usual one, then update that."""
        hard = not self.count or tau <= self.value
        self.add(tau)
        return hard


class BettingEvidence:
    """An e-detector (arXiv 2203.03532) for "the other version is better".

    Each of `STAKES` bets on paired differences d: wealth ← max(wealth, 1) · (1 − stake ·
    clip(d / scale, −1, 1)). While the mean of the clipped d is not negative, the bettors' mean
    wealth reaches `threshold` once in `threshold` differences at most, on average.
    """

    def __init__(self, threshold: float = SWITCH) -> None:
        self.threshold = threshold
        self._wealths: list[float] = []
        self.reset()

    @property
    def wealth(self) -> float:
        return fmean(self._wealths)

    def add(self, difference: float) -> bool:
        """Add d, the steps that this version saves over the other on one text, as a share of the
        usual steps (NaN is ignored); return whether the evidence suffices."""
        if not math.isnan(difference):
            self._wealths = [
                max(wealth, 1.0) * (1 - stake * min(1.0, max(-1.0, difference / scale)))
                for wealth, (scale, stake) in zip(self._wealths, STAKES)
            ]
        return self.wealth >= self.threshold

    def reset(self) -> None:
        self._wealths = [1.0] * len(STAKES)


class FallDetector:
    """CUSUM of τ against the mean and spread of earlier requests.

    It detects what the judge cannot see, such as stale keys and values, or quantisation.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.excess, self._count, self._mean, self._squares = 0.0, 0, 0.0, 0.0

    def add(self, tau: float) -> bool:
        """Add a request's τ (tokens per step), and return whether τ has fallen."""
        if self._count >= LEARN:
            spread = math.sqrt(self._squares / (self._count - 1))
            below = (self._mean - tau) / max(spread, LEAST_SPREAD)
            self.excess = max(0.0, self.excess + below - SLACK)
        self._count += 1
        away = tau - self._mean
        self._mean += away / self._count
        self._squares += away * (tau - self._mean)
        return self.excess > FALLEN
