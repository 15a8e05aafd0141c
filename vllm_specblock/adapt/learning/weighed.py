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
        depths: of both on each text since, tokens.
        over_current: what `after` has over the version that served, on each.
    """

    action: Action
    before: Version
    after: Version
    serves: Version
    seconds: float
    depths: list[tuple[float, float]] = field(default_factory=list)
    over_current: list[float] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Δτ / τ, where τ is 1 + depth; NaN where there was no text."""
        if not self.depths:
            return math.nan
        before, after = (fmean(each) for each in zip(*self.depths))
        return (after - before) / (1 + before)

    @property
    def error(self) -> float:
        """Standard error of the gain, by how texts differ in it; NaN below two of them."""
        if len(self.depths) < 2:
            return math.nan
        spread = stdev(after - before for before, after in self.depths)
        before = fmean(each for each, _ in self.depths)
        return spread / math.sqrt(len(self.depths)) / (1 + before)
