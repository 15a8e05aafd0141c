"""A mean that forgets."""

from __future__ import annotations


class SlowMean:
    """The plain mean of the first 1 / `weight` values, then an EWMA.

    Attributes:
        value: 0 before any.
        count: of the values so far.
    """

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.count = weight, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)
