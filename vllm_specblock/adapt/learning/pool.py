"""Versions in memory, and the choice of the serving one.

The text does not depend on the drafter, so every kept version is judged on every text. Leaving a
version takes more evidence than calling it good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_specblock.adapt.policy.actions import Tensors
from vllm_specblock.adapt.policy.evidence import GOOD, SWITCH, BettingEvidence, SlowMean
from vllm_specblock.adapt.policy.interface import Action

USUAL = 1 / 64
"""Weight of a text in the mean steps, by which differences are divided."""


@dataclass(frozen=True, eq=False)
class Version:
    """A drafter's weights.

    Attributes:
        number: 0 for θ_0; unique.
        tensors: every parameter by name; unchanged ones are shared with the parent.
        action: the arm of its last update, skip for θ_0.
        parent: number of the version that training started from.
    """

    number: int
    tensors: Tensors = field(repr=False)
    action: Action = Action.SKIP
    parent: int | None = None


class Pool:
    """θ_0, the last good version, the current one, and an earlier one that was good for long.

    Evidence compares the current version with each kept one. It outlives offers, which come more
    often than decisions.

    Attributes:
        origin, good, current: versions, which may be the same.
        earlier: None until a good version was replaced.
        returns: numbers of restored versions.
    """

    def __init__(self, origin: Version) -> None:
        self.origin = self.good = self.current = origin
        self.earlier: Version | None = None
        self.returns: list[int] = []
        self._tenure = Counter[int]()  # judged texts through which a version was the good one
        self._against: dict[int, BettingEvidence] = {}
        self._gain = BettingEvidence(GOOD)
        self._usual = SlowMean(USUAL)  # steps per token of what served

    @property
    def kept(self) -> list[Version]:
        """Distinct kept versions, the current one first."""
        found = {v.number: v for v in (self.current, self.good, self.origin, self.earlier) if v}
        return list(found.values())

    def offer(self, version: Version) -> None:
        """Let a version serve."""
        self.current = version
        self._forget_others()

    def judge(self, steps: Mapping[int, float]) -> Version | None:
        """Learn from one fresh text's steps per token of each kept version, by number (NaN:
        unknown); return the version to serve from now on, None: no change."""
        mine = steps[self.current.number]
        if math.isnan(mine):
            return None
        self._usual.add(mine)
        self._tenure[self.good.number] += 1
        for other in self.kept[1:]:
            evidence = self._against.setdefault(other.number, BettingEvidence())
            evidence.add((steps[other.number] - mine) / self._usual.value)
        gained = (mine - steps[self.good.number]) / self._usual.value
        if self.good is not self.current and self._gain.add(gained):
            self.call_good()
        if len(self.kept) == 1:
            return None
        best = max(self.kept[1:], key=lambda other: self._against[other.number].wealth)
        enough = self._against[best.number].wealth >= SWITCH
        return self._go_back(best) if enough else None

    def call_good(self) -> None:
        """Make the current version the one to return to."""
        before, self.good = self.good, self.current
        found = [v for v in (self.earlier, before) if v and v not in (self.good, self.origin)]
        self.earlier = max(found, key=lambda v: self._tenure[v.number], default=None)
        self._gain.reset()
        self._forget_others()

    def roll_back(self) -> Version | None:
        """Restore the last good version; None: it already serves."""
        return None if self.good is self.current else self._go_back(self.good)

    def _go_back(self, version: Version) -> Version:
        self.current = version
        self.returns.append(version.number)
        self._against.clear()
        self.call_good()
        return version

    def _forget_others(self) -> None:
        kept = {version.number for version in self.kept}
        self._against = {n: each for n, each in self._against.items() if n in kept}
        self._tenure = Counter({n: count for n, count in self._tenure.items() if n in kept})
