"""Step cost: relative times of steps and drafts, learned online.

A slow phase of the machine slows all steps and must not affect decisions. Therefore only ratios are
learned: of a step to the previous one, and of drafting to its step. A Kalman filter divides the
error of a ratio among its costs, by their uncertainty.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

SPREAD = 0.5
"""Standard deviation of start-up costs in nats, which other work may have disturbed. Errors of
similar sizes are correlated."""

NOISE = 0.15
"""Initial standard deviation of a measured ratio, in nats. Beyond two of them, larger errors count
less: a step that compiled something does not predict the next one."""

FORGET = 2e-5
"""Decay of the information per ratio."""

LOOKUP, BRIEF, WHOLE = range(3)
"""Proposals by cost: of no drafter with weights, of the first block of drafters, of all blocks."""

_LOOKUP = 0.1  # initial cost of a lookup, relative to a drafter with weights


class _Step(NamedTuple):
    rows: int
    requests: int
    trees: bool


class _Curve:
    """Monotone costs at increasing points, linear in between and beyond."""

    def __init__(self, points: np.ndarray, logs: np.ndarray, first: int) -> None:
        self.points, self.places, self.first = points, points.tolist(), first  # a host array
        self.logs = logs[first : first + len(points)]  # before they are made monotone; a view
        self.update()

    def update(self) -> None:
        """Recompute the costs from the logs."""
        self.costs = np.maximum.accumulate(np.exp(self.logs))

    def __call__(self, at: np.ndarray | float) -> np.ndarray:
        found = np.interp(at, self.points, self.costs)
        if len(self.places) > 1:
            slope = (self.costs[-1] - self.costs[-2]) / (self.places[-1] - self.places[-2])
            found = found + slope * np.maximum(np.asarray(at) - self.places[-1], 0)
        return found

    def add_gradient(self, gradient: np.ndarray, at: float, sign: float) -> None:
        """Add the gradient of the log of a cost, with respect to all logs."""
        above = min(bisect_left(self.places, at), len(self.places) - 1)
        below = max(above - 1, 0)
        low, high = self.places[below], self.places[above]
        share = min((at - low) / (high - low), 1.0) if high > low else 1.0
        part = share * math.exp(self.logs[above] - self.logs[below])
        part /= part + 1 - share
        gradient[self.first + below] += sign * (1 - part)
        gradient[self.first + above] += sign * part


class StepCost:
    """The model of a step's time.

    A step takes `scale · (verify(rows) + draft(requests))`, a plain one `scale · plain(requests)`.
    Relative costs have no unit; a plain step of one request was 1 when costs were measured.
    """

    def __init__(self) -> None:
        rows = 2 ** np.arange(13)
        self.measured({n: 0.95 + 0.05 * n for n in rows.tolist()}, {1: 0.2})  # host arrays

    def measured(
        self,
        verify: Mapping[int, float],
        draft: Mapping[int, float],
        brief: Mapping[int, float] | None = None,
        noisy: bool = True,
    ) -> None:
        """Restart from measured times.

        Args:
            verify: rows of a step → seconds, or any unit; two sizes at least.
            draft: requests → time to draft for them, in the same unit; brief: for one block.
            noisy: the times may include other work.
        """
        (rows, times), (counts, drafting) = _plausible(verify), _plausible(draft)
        drafts = [_LOOKUP * drafting, _plausible(brief or draft)[1], drafting]
        # The last entry: a plain step over one that verifies no node.
        found = np.concatenate([times, *drafts, times[:1]])
        self._logs = logs = np.log(np.maximum(found / times[0], 1e-7))
        self.verify = _Curve(rows, logs, 0)  # relative costs of steps with trees, by rows
        self._drafts = [_Curve(counts, logs, len(rows) + by * len(counts)) for by in range(3)]
        self._covariance: np.ndarray | None = None  # until the first step
        self._spread = SPREAD if noisy else NOISE
        self._noise = [NOISE**2, NOISE**2]  # variance of ratios of steps, and of drafts to steps
        self._last, self._seconds = _Step(int(rows[0]), 0, True), float(times[0])
        self.read = 0.0  # drafters' cost of a missed row

    def plain(self, requests: int) -> float:
        """Return the relative cost of a step without drafts."""
        return float(self.verify(requests)) * math.exp(min(self._logs[-1], 0.0))

    def draft(self, requests: int, by: int = WHOLE) -> float:
        """Return the relative cost of a proposal."""
        return float(self._drafts[by](requests))

    def of(self, seconds: float) -> float:
        """Return the relative cost of a time measured now."""
        return seconds / self._seconds * self._cost(self._last)

    def doubt(self, rows: int, requests: int) -> float:
        """Return the standard deviation of log(verify(rows) / plain(requests))."""
        if self._covariance is None:
            return 0.0
        gradient = self._gradient(_Step(rows, requests, True), _Step(requests, requests, False))
        return math.sqrt(max(float(gradient @ self._covariance @ gradient), 0.0))

    def observe(self, rows: int, requests: int, trees: bool, seconds: float) -> None:
        """Learn from a step without its drafting; trees: it verified drafts."""
        step, last, seconds = _Step(rows, requests, trees), self._last, max(seconds, 1e-9)
        if self._covariance is None:
            self._initial = self._prior()
            self._covariance = self._initial.copy()
        else:
            error = math.log(self.of(seconds) / self._cost(step))
            self._covariance += FORGET * (self._initial - self._covariance)
            if step == last:
                self._noise[0] = _variance(self._noise[0], error, self._noise[0])
            else:
                self._learn(self._gradient(step, last), error, False)
        self._last, self._seconds = step, seconds

    def observe_draft(self, requests: int, by: int, seconds: float, read: int) -> None:
        """Learn from a proposal in the last step; read: missed rows that its drafters read."""
        cost, expected = self.of(seconds), self.draft(requests, by)
        if read > 4 * requests:  # mostly reading
            extra = max(cost - expected, 0.0) / read
            self.read += (0.1 if self.read else 1.0) * (extra - self.read)
        elif self._covariance is not None:
            gradient = -self._gradient(self._last)
            self._drafts[by].add_gradient(gradient, requests, 1.0)
            self._learn(gradient, math.log(max(cost, 1e-6) / expected), True)

    def _cost(self, step: _Step) -> float:
        if step.trees:
            return float(self.verify(step.rows))
        return self.plain(step.requests)

    def _gradient(self, step: _Step, other: _Step | None = None) -> np.ndarray:
        """Return the gradient of log(cost of a step / cost of the other)."""
        found = np.zeros(len(self._logs))
        for each, sign in ((step, 1.0), (other, -1.0)):
            if each is not None:
                self.verify.add_gradient(found, each.rows, sign)
                found[-1] += sign * (not each.trees)
        return found

    def _prior(self) -> np.ndarray:
        """Return the covariance of start-up costs; it halves with every 0.7 doublings of a size."""
        found = np.zeros((len(self._logs), len(self._logs)))
        for curve in self.verify, *self._drafts:
            here = slice(curve.first, curve.first + len(curve.points))
            octave = np.log2(curve.points)
            found[here, here] = self._spread**2 * np.exp(-np.abs(octave[:, None] - octave))
        found[-1, -1] = NOISE**2
        return found

    def _learn(self, gradient: np.ndarray, error: float, drafts: bool) -> None:
        """Learn from the error of a log ratio: of drafting to a step, or of two steps."""
        covariance = self._covariance
        assert covariance is not None
        spread = covariance @ gradient
        known, noise = float(gradient @ spread), self._noise[drafts]
        variance = known + noise
        # Squared instead of 1.5, it would not unlearn costs that it holds for certain.
        trust = min(1.0, (4 * variance / max(error**2, 1e-9)) ** 0.75)
        self._noise[drafts] = _variance(noise, error, variance)
        self._logs += spread * (trust * error / variance)
        covariance -= np.outer(spread, spread * (trust / variance))
        for curve in self.verify, *self._drafts:
            curve.update()


def _variance(noise: float, error: float, expected: float) -> float:
    """Return the noise variance, updated by an error of this expected variance."""
    return max(noise + 0.02 * (min(error**2, 4 * expected) - expected), 1e-4)


def _plausible(measured: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes [n] and times [n] without time lost to other work, which only adds.

    No time exceeds that of a larger size, or that of enough smaller ones. Sizes are the powers of
    two, the smallest and the largest: the covariance of more would not fit in a CPU's L1 cache.
    """
    kept = [n for n in sorted(measured) if n & (n - 1) == 0 or n in (min(measured), max(measured))]
    sizes = np.array(kept, dtype=float)
    each = np.minimum.accumulate(np.array([measured[n] for n in kept]) / sizes)
    return sizes, np.minimum.accumulate((each * sizes)[::-1])[::-1]
