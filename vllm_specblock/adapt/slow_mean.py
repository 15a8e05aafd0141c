"""A mean that forgets."""

from __future__ import annotations


class SlowMean:
    """The plain mean of the first 1 / `weight` values, then an EWMA: from 0 on an EWMA alone would
    take as many to be believed.

    Args:
        weight: of each later value, above 0 and at most 1.

    Attributes:
        value: 0 before any.
        count: of the values so far.
    """

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.count = weight, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)
