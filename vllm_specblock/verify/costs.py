"""What a step takes by the number of its tokens and requests, learned from the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_PRIOR = np.array([1.0, 0.05, 0.05])
"""Before anything was measured: a request, and a token, add a twentieth of an empty step."""

_ROBUST_AFTER, _OUTLIER = 16, 3.0
"""Once so many steps were seen, one that took so many times what was expected is no step of ours:
the process was paused, or waited for something."""


class StepCosts:
    """Least squares of time on (1, requests, tokens), older steps counting less.

    That is all that a device without graphs needs: its steps take longer with every token. Only
    the ratio of two predictions is of use before anything was observed.

    Args:
        decay: what a step counts one step later. The default forgets half in 140 steps.
    """

    def __init__(self, decay: float = 0.995):
        self.decay, self.seen = decay, 0
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._weights = _PRIOR

    def observe(self, tokens: int, requests: int, seconds: float) -> None:
        """A step of so many tokens and requests took so long."""
        if self.seen >= _ROBUST_AFTER:
            expected = self.seconds(np.array([tokens]), requests)[0]
            if seconds > _OUTLIER * expected:
                return
        x = np.array([1.0, requests, tokens])
        self._normal = self.decay * self._normal + np.outer(x, x)
        self._moment = self.decay * self._moment + seconds * x
        self.seen += 1
        # What the steps so far say nothing of (a single batch size, say) stays as in the prior.
        scale = self._moment[0] / (self._normal[0] @ _PRIOR)
        ridge = 1e-3 * np.diag(np.diag(self._normal))
        left = self._moment - self._normal @ (scale * _PRIOR)
        self._weights = scale * _PRIOR + np.linalg.solve(self._normal + ridge, left)

    def seconds(self, tokens: np.ndarray, requests: int) -> np.ndarray:
        """[n] integers → [n] float, never falling from one number of tokens to a larger one."""
        fixed, request, token = self._weights
        token = max(token, 0.0)
        floor = 1e-3 * abs(fixed) + 1e-9
        return np.maximum(fixed + request * requests, floor) + token * tokens


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
