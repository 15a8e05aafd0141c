"""An update while its gain is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.interface import Action


@dataclass
class Weighed:
    """An update whose gain shows on the requests after it: like the interval of the paper's eq. 10,
    but both versions are held against the same texts, whichever of them served.

    Attributes:
        action: the arm.
        before, after: θ_train; the same where nothing was learned.
        serves: the version that served then, maybe `after` itself.
        seconds: that serving lost by it.
        steps: of both per token, on each hard text since.
        saved: steps per token that `after` saves against the version that served, on each text.
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
        """Δτ / τ, where τ is tokens over steps of all texts; NaN where there was none."""
        if not self.steps:
            return math.nan
        before, after = (fmean(each) for each in zip(*self.steps))
        return before / after - 1

    @property
    def error(self) -> float:
        """Standard error of the gain, by how texts differ in it; NaN below two of them."""
        if len(self.steps) < 2:
            return math.nan
        ratio = 1 + self.gain
        spread = stdev(before - ratio * after for before, after in self.steps)
        return spread / math.sqrt(len(self.steps)) / fmean(after for _, after in self.steps)
