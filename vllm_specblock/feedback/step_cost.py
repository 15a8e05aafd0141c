"""Step cost: how long a step takes, by its rows, learned from the steps themselves.

A machine that is slow for a while is slow for all steps, and no decision depends on that. So time
is a scale, which follows every step at once, times a shape, which is learned where two successive
steps differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SHAPE_STEP, SHAPE_MEMORY = 0.6, 25
"""Share of an error that the shape takes over at the first step of a size; at the n-th, n-th part
of it, down to this many."""

CLIP = 0.35
"""Largest error, in nats, that the shape learns from: one outlier must not decide."""

_OUTLIER = 2.5  # nats; the process did something else meanwhile
_FRESH = 3  # steps of a size that replace the figure measured at start-up
_PLAIN_STEPS = 31  # comparisons of plain steps with others; their median counts
_DRAFT = 0.2  # share of a step that drafting takes, until it is measured
_LOOKUP = 0.1  # share of the time to draft that a lookup takes, until it is seen
_READ_STEPS = 0.1  # share of a catch-up's error that the cost of a row takes over


class StepCost:
    """The model of a step's time.

    A step takes `scale · (verify(rows, requests) + draft(requests))`, a plain one
    `scale · plain(requests)`. Relative costs have no unit; a plain step of one request was 1 when
    costs were measured.

    Attributes:
        per_request: what a request costs beside its rows.
        read: what drafters take to read a row that they have missed.
    """

    def __init__(self) -> None:
        rows = 2 ** np.arange(13)
        times = 0.95 + 0.05 * rows
        self.measured(dict(zip(rows.tolist(), times.tolist())), {1: _DRAFT})  # host arrays

    def measured(
        self,
        verify: Mapping[int, float],
        draft: Mapping[int, float],
        per_request: float = 0.0,
        noisy: bool = True,
    ) -> None:
        """Begin anew with measured times.

        Args:
            verify: rows of a step → seconds, or any unit; two sizes at least.
            draft: requests → time to draft for them, in the same unit.
            per_request: time of a request beside its rows.
            noisy: other work may have been in these times.
        """
        self._rows = np.array(sorted(verify), dtype=float)
        times = np.array([verify[int(rows)] for rows in self._rows])
        times = _plausible(self._rows, times) if noisy else np.maximum.accumulate(times)
        self._scale = float(np.log(times[0]))
        self._times = times / times[0]
        self._steps = np.zeros(len(times))
        slope = (times[-1] - times[-2]) / (self._rows[-1] - self._rows[-2]) / times[0]
        self._beyond = max(float(slope), 0.0)  # per row
        # Log ratio to a step of so many rows with trees: the median where one follows the other.
        self._plain, self._plain_seen = 0.0, [0.0]
        self._before: tuple[int, int, bool, float] | None = None
        self._requests = 2.0 ** np.arange(11)
        given = np.array(sorted(draft), dtype=float)
        seconds = np.array([draft[int(count)] for count in given])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # too long, if anything
        found = np.interp(self._requests, given, seconds) / times[0]
        # Without a drafter with weights, and with one, as it was measured.
        self._draft = np.log(np.maximum([_LOOKUP * found, found], 1e-6))
        self._drafts = np.zeros((2, len(found)))
        self.per_request, self.read = per_request / times[0], 0.0

    def verify(self, rows: np.ndarray | float, requests: int) -> np.ndarray:
        """[n] rows of a step that verifies trees → [n] relative costs."""
        beyond = np.maximum(np.asarray(rows) - self._rows[-1], 0)
        found = np.interp(rows, self._rows, self._times)
        return found + self._beyond * beyond + self.per_request * requests

    def plain(self, requests: int) -> float:
        """Relative cost of a step without drafts."""
        return float(self.verify(requests, requests) * np.exp(self._plain))

    def draft(self, requests: int, asked: bool = True) -> float:
        """Relative cost to draft; asked: by a drafter with weights, if there is one."""
        return float(np.exp(np.interp(np.log2(requests), np.arange(11), self._draft[int(asked)])))

    def of(self, seconds: float) -> float:
        """Relative cost of something that took so long just now."""
        return float(seconds * np.exp(-self._scale))

    def observe(self, rows: int, requests: int, trees: bool, seconds: float) -> None:
        """Learn from a step, less its drafting; trees: it verified drafts."""
        level, before = self._level((rows, requests, trees, seconds)), self._before
        self._scale, self._before = level, (rows, requests, trees, seconds)
        if before is None or before[:3] == (rows, requests, trees):
            return
        error = level - self._level(before)
        if abs(error) > _OUTLIER:
            return
        if trees != before[2]:
            error = self._plain + float(np.clip(error, -CLIP, CLIP)) * (1 if before[2] else -1)
            self._plain_seen = [*self._plain_seen[1 - _PLAIN_STEPS :], error]
            self._plain = min(float(np.median(self._plain_seen)), 0.0)
            return
        ends = self._around(rows), self._around(before[0])
        known = [sum(part * self._steps[place] for place, part in end) for end in ends]
        for end, sign, mine, other in zip(ends, (1, -1), known, known[::-1]):
            # A start-up figure gives way sooner, but only downwards: it was too high.
            least = -2 * CLIP if mine < _FRESH else -CLIP
            change = float(np.clip(sign * error, least, CLIP)) * (other + 1) / (mine + other + 2)
            for place, part in end:
                step = 2 * SHAPE_STEP / np.clip(self._steps[place], 1, SHAPE_MEMORY)
                self._times[place] *= np.exp(part * min(step, 1) * change)
                self._steps[place] += part
        # As in `_plausible`: a size costs no less than a smaller one, and a row of it no more.
        self._times = np.maximum.accumulate(self._times)
        self._times = self._rows * np.minimum.accumulate(self._times / self._rows)

    def _level(self, step: tuple[int, int, bool, float]) -> float:
        """Return the log of a step's time over its relative cost."""
        rows, requests, trees, seconds = step
        expected = float(self.verify(rows, requests)) if trees else self.plain(requests)
        return float(np.log(max(seconds, 1e-9) / expected))

    def _around(self, rows: int) -> list[tuple[int, float]]:
        """Return the two sizes around `rows`, and their shares of it."""
        above = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        below = max(above - 1, 0)
        gap = self._rows[above] - self._rows[below]
        share = 1.0 if not gap else float(np.clip((rows - self._rows[below]) / gap, 0, 1))
        return [(above, share), (below, 1 - share)]

    @property
    def compared(self) -> bool:
        """Whether plain steps were compared with others often enough."""
        return len(self._plain_seen) >= _PLAIN_STEPS

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many rows were seen, or none ever are."""
        seen = sum(part * self._steps[place] for place, part in self._around(rows))
        return self._before is None or seen >= _FRESH

    def observe_draft(self, requests: int, asked: bool, seconds: float, read: int) -> None:
        """Learn from a proposal; read: rows that its drafters had missed before."""
        cost, expected = self.of(seconds), self.draft(requests, asked)
        if read > 4 * requests:  # mostly that
            extra = max(cost - expected, 0.0) / read
            self.read += (_READ_STEPS if self.read else 1.0) * (extra - self.read)
            return
        error = float(np.clip(np.log(max(cost, 1e-6) / expected), -3, 3))
        mode, place = int(asked), min(round(np.log2(requests)), len(self._requests) - 1)
        if self._drafts[mode, place] >= _FRESH:
            self._draft[mode, place] += 0.05 * error
        else:  # sizes that never came follow
            unseen = self._drafts[mode] == 0
            unseen[place] = True
            self._draft[mode, unseen] += SHAPE_STEP * error
        self._drafts[mode, place] += 1


def _plausible(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Measured times, less what other work took meanwhile: they can only be too long.

    A step takes no longer than a larger one, nor than as many smaller ones as have its rows.
    """
    times = np.minimum.accumulate(times[::-1])[::-1].astype(float)
    for place in range(1, len(rows)):
        times[place] = min(times[place], times[place - 1] * rows[place] / rows[place - 1])
    return np.minimum.accumulate(times[::-1])[::-1]


def cost_per_request(
    alone: Mapping[int, tuple[float, int]], trees: Mapping[int, tuple[float, int]]
) -> float:
    """What a request adds to a step beside its rows: its context is read once for all of them.

    Args:
        alone: rows → (time, requests) of a step of as many requests as can be.
        trees: rows → (time, requests) of a step in which few requests have them all.

    Returns:
        The median over the steps that both have, in the unit of the times; 0 where none has.
    """
    found = []
    for rows in alone.keys() & trees.keys():
        (time, many), (shorter, few) = alone[rows], trees[rows]
        if many > few:
            found.append((time - shorter) / (many - few))
    return max(float(np.median(found)), 0.0) if found else 0.0
