"""Step cost by number of tokens and requests, learned from the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_PRIOR = np.array([1.0, 0.05, 0.05])
"""Before anything was measured: a request, and a token, add a twentieth of an empty step."""

_MEASURED = np.array([1.0, 0.0, 0.0])
"""Where steps were measured by their tokens: nothing is added, until steps say so."""

_RIDGE, _RIDGE_MEASURED = 1e-3, 3e-2
"""What the prior counts, of all steps: of what was measured more, since a step's time on a busy
machine is off by more than what a few tokens add."""

_FAR = 1e6  # tokens

_NEWCOMER = 2.0
"""Of n steps the sum counts as n / this: the first ones less than the last."""

_SOLVE_EVERY = 8
"""Once `_ROBUST_AFTER` steps were seen: a solution takes as long as a hundred additions."""

_ROBUST_AFTER, _OUTLIER = 16, 3.0
"""Once so many steps were seen, one that took so many times what was expected is no step of ours:
the process was paused, or waited for something."""


class StepCost:
    """Least squares of time on (base(tokens), requests, tokens), older steps counting less.

    `base` is 1, or what steps of so many tokens took when they were measured, relative to one
    token: a processor's products cost nothing more up to a number of rows, and then they do. Only
    the ratio of two predictions is of use before anything was observed.

    Args:
        decay: what a step counts one step later. The default forgets half in 140 steps.
    """

    def __init__(self, decay: float = 0.995) -> None:
        self.decay, self.seen = decay, 0
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._weights = self._prior = _PRIOR
        self._ridge = _RIDGE
        self._base = np.array([0.0]), np.array([1.0])

    def measured(self, tokens: np.ndarray, seconds: np.ndarray) -> None:
        """Begin anew with what steps took: [n] rising integers, two at least, [n] times.

        Between and beyond them it is as on straight lines.
        """
        seconds = np.maximum.accumulate(seconds)
        slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
        beyond = seconds[-1] + slope * (_FAR - tokens[-1])
        tokens, seconds = np.append(tokens, _FAR), np.append(seconds, beyond)
        self._base = tokens.astype(float), seconds / seconds[0]
        self._prior, self._ridge = _MEASURED, _RIDGE_MEASURED
        self._weights = seconds[0] * _MEASURED
        self._normal[:], self._moment[:], self.seen = 0, 0, 0

    def observe(self, tokens: int, requests: int, seconds: float) -> None:
        """A step of so many tokens and requests took so long."""
        if self.seen >= _ROBUST_AFTER:
            expected = self.seconds(np.array([tokens]), requests)[0]
            if seconds > _OUTLIER * expected:
                return
        x = np.array([np.interp(tokens, *self._base), requests, tokens])
        # The first steps also load and prepare what later ones find there: they count for little.
        keep = min(self.decay, self.seen / (self.seen + _NEWCOMER))
        self._normal = keep * self._normal + np.outer(x, x)
        self._moment = keep * self._moment + seconds * x
        self.seen += 1
        if self.seen > _ROBUST_AFTER and self.seen % _SOLVE_EVERY:
            return
        # What the steps so far say nothing of (a single batch size, say) stays as in the prior.
        scale = self._moment[0] / (self._normal[0] @ self._prior)
        ridge = self._ridge * np.diag(np.diag(self._normal))
        left = self._moment - self._normal @ (scale * self._prior)
        self._weights = scale * self._prior + np.linalg.solve(self._normal + ridge, left)

    def seconds(self, tokens: np.ndarray, requests: int) -> np.ndarray:
        """[n] integers → [n] float, never falling from one number of tokens to a larger one."""
        base, request, token = self._weights
        token = max(token, 0.0)
        floor = 1e-3 * abs(base) + 1e-9
        by_tokens = np.maximum(base, 0.0) * np.interp(tokens, *self._base)
        return np.maximum(by_tokens + request * requests, floor) + token * tokens


def cost_per_request(
    alone: Mapping[int, tuple[float, int]], trees: Mapping[int, tuple[float, int]]
) -> float:
    """What a request adds to a step beside its tokens: its context is read once for all of them.

    Args:
        alone: tokens → (time, requests) of a step of as many requests as can be.
        trees: tokens → (time, requests) of a step in which few requests have them all.

    Returns:
        The median over the steps that both have, in the unit of the times; 0 where none has.
    """
    found = []
    for tokens in alone.keys() & trees.keys():
        (time, many), (shorter, few) = alone[tokens], trees[tokens]
        if many > few:
            found.append((time - shorter) / (many - few))
    return max(float(np.median(found)), 0.0) if found else 0.0
