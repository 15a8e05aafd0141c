"""Statistics of a stream: its usual τ, and the gain of the last update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from vllm_specblock.adapt.learning.pool import SlowMean, Version
from vllm_specblock.adapt.policy.interface import Action

SLOW = 1 / 256
"""Weight of a request in the usual τ, after a plain mean of the first 256: slow, so that texts of a
new domain stay hard until most of it is learned."""


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


@dataclass
class Weighed:
    """Gain of an update on later requests, both versions on the same texts.

    Attributes:
        action: the arm.
        before, after: θ_train; the same if nothing was learned.
        serves: the version that served then, maybe `after` itself.
        seconds: serving time lost.
        steps: steps per token of both, on each hard text since.
        saved: steps per token that `after` saves over `serves`, on each text.
    """

    action: Action
    before: Version
    after: Version
    serves: Version
    seconds: float
    steps: list[tuple[float, float]] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Δτ / τ over all texts; NaN: there was none."""
        if not self.steps:
            return math.nan
        before, after = (fmean(each) for each in zip(*self.steps))
        return before / after - 1

    @property
    def error(self) -> float:
        """Standard error of the gain over texts; NaN below two texts."""
        if len(self.steps) < 2:
            return math.nan
        ratio = 1 + self.gain
        spread = stdev(before - ratio * after for before, after in self.steps)
        return spread / math.sqrt(len(self.steps)) / fmean(after for _, after in self.steps)
