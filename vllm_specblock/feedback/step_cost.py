"""Step cost: relative times of steps and drafts, learned online.

A slow phase of the machine slows all steps and must not affect decisions. Therefore only ratios are
learned: of a step to the previous one, and of drafting to its step. A Kalman filter divides the
error of a ratio among its costs, by their uncertainty.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

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
_FAR = 2.0**20  # more rows than any step has


class _Curve:
    """Monotone costs at increasing points, linear in between and beyond."""

    def __init__(self, points: np.ndarray, logs: np.ndarray, first: int) -> None:
        self.places, self.here = points.tolist(), slice(first, first + len(points))  # a host array
        self.logs = logs[self.here]  # before they are made monotone; a view
        self._points, self._costs = np.append(points, _FAR), np.zeros(len(points) + 1)
        self._steps = (_FAR - points[-1]) / max(points[-1] - points[-2:][0], 1)  # of the last size
        self.update()

    def update(self) -> None:
        """Recompute the costs from the logs."""
        costs = np.maximum.accumulate(np.exp(self.logs), out=self._costs[:-1])
        self._costs[-1] = costs[-1] + self._steps * (costs[-1] - costs[-2:][0])

    def __call__(self, at: np.ndarray | float) -> Any:
        return np.interp(at, self._points, self._costs)

    def add_gradient(self, gradient: np.ndarray, at: float) -> None:
        """Add the gradient of the log of a cost, with respect to all logs."""
        above = min(bisect_left(self.places, at), len(self.places) - 1)
        below = max(above - 1, 0)
        low, high = self.places[below], self.places[above]
        share = min((at - low) / (high - low), 1.0) if high > low else 1.0
        part = share * math.exp(self.logs[above] - self.logs[below])
        part /= part + 1 - share
        gradient[self.here][below] += 1 - part
        gradient[self.here][above] += part


class StepCost:
    """The model of a step's time.

    A step takes `scale · (verify(rows) + draft(requests))`, a plain one `scale · plain(requests)`.
    Relative costs have no unit; a plain step of one request was 1 when costs were measured.
    """

    def __init__(self) -> None:
        self.measured({2**n: 0.95 + 0.05 * 2**n for n in range(13)}, {1: 0.2})

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
        # The covariance of start-up costs halves with every 0.7 doublings of a size.
        self._initial = np.diag([0.0] * (len(logs) - 1) + [NOISE**2])
        for curve in self.verify, *self._drafts:
            octave, spread = np.log2(curve.places), SPREAD if noisy else NOISE
            near = np.exp(-np.abs(octave[:, None] - octave))
            self._initial[curve.here, curve.here] = spread**2 * near
        self._covariance = np.zeros_like(self._initial)  # until the first step
        self._noise = [NOISE**2, NOISE**2]  # variance of ratios of steps, and of drafts to steps
        self._steps, self._last, self._seconds = 0, (int(rows[0]), True), float(times[0])
        self.read = 0.0  # drafters' cost of a missed row

    def plain(self, requests: int) -> float:
        """Return the relative cost of a step without drafts."""
        return float(self.verify(requests)) * math.exp(min(self._logs[-1], 0.0))

    def draft(self, requests: int, by: int = WHOLE) -> float:
        """Return the relative cost of a proposal."""
        return float(self._drafts[by](requests))

    def of(self, seconds: float) -> float:
        """Return the relative cost of a time measured now."""
        return seconds / self._seconds * self._cost(*self._last)

    def doubt(self, rows: int, requests: int) -> float:
        """Return the standard deviation of log(verify(rows) / plain(requests))."""
        gradient = self._gradient(rows, True) - self._gradient(requests, False)
        return math.sqrt(max(float(gradient @ self._covariance @ gradient), 0.0))

    def observe(self, rows: int, trees: bool, seconds: float) -> None:
        """Learn from a step without its drafting; trees: it verified drafts."""
        step, last, seconds = (rows, trees), self._last, max(seconds, 1e-9)
        if self._steps:
            error = math.log(self.of(seconds) / self._cost(*step))
            self._covariance += FORGET * (self._initial - self._covariance)
            self._learn(self._gradient(*step) - self._gradient(*last), error, False)
        else:
            self._covariance += self._initial
        self._last, self._seconds, self._steps = step, seconds, self._steps + 1

    def observe_draft(self, requests: int, by: int, seconds: float, read: int) -> None:
        """Learn from a proposal in the last step; read: missed rows that its drafters read."""
        cost, expected = self.of(seconds), self.draft(requests, by)
        if read > 4 * requests:  # mostly reading
            extra = max(cost - expected, 0.0) / read
            self.read += (0.1 if self.read else 1.0) * (extra - self.read)
        elif self._steps:
            gradient = -self._gradient(*self._last)
            self._drafts[by].add_gradient(gradient, requests)
            self._learn(gradient, math.log(max(cost, 1e-6) / expected), True)

    def _cost(self, rows: int, trees: bool) -> float:
        return float(self.verify(rows)) if trees else self.plain(rows)

    def _gradient(self, rows: int, trees: bool) -> np.ndarray:
        """Return the gradient of the log of a step's cost."""
        found = np.zeros(len(self._logs))
        self.verify.add_gradient(found, rows)
        found[-1] = not trees
        return found

    def _learn(self, gradient: np.ndarray, error: float, drafts: bool) -> None:
        """Learn from the error of a log ratio: of drafting to a step, or of two steps."""
        spread = self._covariance @ gradient
        known, noise = float(gradient @ spread), self._noise[drafts]
        variance = known + noise
        # Squared instead of 1.5, it would not unlearn costs that it holds for certain.
        trust = min(1.0, (4 * variance / max(error**2, 1e-9)) ** 0.75)
        self._noise[drafts] = max(noise + 0.02 * (min(error**2, 4 * variance) - variance), 1e-4)
        if known:  # two steps that differ
            self._logs += spread * (trust * error / variance)
            self._covariance -= np.outer(spread, spread * (trust / variance))
            for curve in self.verify, *self._drafts:
                curve.update()


def _plausible(measured: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes [n] and times [n] without time lost to other work, which only adds.

    No time exceeds that of a larger size, or that of enough smaller ones. Sizes are the powers of
    two, the smallest and the largest: the covariance of more would not fit in a CPU's L1 cache.
    """
    kept = [n for n in sorted(measured) if n & (n - 1) == 0 or n in (min(measured), max(measured))]
    sizes = np.array(kept, dtype=float)
    each = np.minimum.accumulate(np.array([measured[n] for n in kept]) / sizes)
    return sizes, np.minimum.accumulate((each * sizes)[::-1])[::-1]
