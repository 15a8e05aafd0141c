"""Attacked streams: half of the requests are made to spoil the drafter for all others.

They can spoil speed alone. Half of the traffic decides half of what is learned, so the goal is that
other requests keep the speed that they had without adaptation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.simulation import Served
from lib.streams import HOME, Place
from vllm_specblock.train.learner import EvalSequence

ATTACKS = ("random", "loop", "scaled")
"""Answers at a high temperature to random prompts; texts that repeat a few tokens; texts of home
whose features are too large. Their texts follow those of home, in this order."""

TIMES = 10.0
"""By which features are too large."""

CLEAN = "clean"
"""Begins the phases of requests that do not attack."""


def attacked(length: int) -> list[Place]:
    """A stream of `length` requests: a fifth clean, a fifth with each attack as every other
    request, a fifth clean again. No text comes twice."""
    part = length // (len(ATTACKS) + 2)
    phases = ["before", *ATTACKS, "after"]
    places, home = [], 0
    for number, phase in enumerate(phases):
        for request in range(part):
            if phase in ATTACKS and request % 2:
                places.append(Place(phase, number, request // 2))
            else:
                places.append(Place(f"{CLEAN}, {phase}", HOME, home))
                home += 1
    return places


def scaled(sequence: EvalSequence, times: float = TIMES) -> EvalSequence:
    """A text whose features are too large."""
    return replace(sequence, hidden=times * sequence.hidden, last=times * sequence.last)


@dataclass(frozen=True)
class Kept:
    """What clean requests kept of the speed that they have without adaptation.

    Attributes:
        share: τ of all of them as a share of frozen's.
        by_phase: the same per phase.
        longest: windows in a row, at most, whose share is below `LEAST`.
    """

    share: float
    by_phase: dict[str, float]
    longest: int


LEAST = 0.98
WINDOW = 8


def kept(
    served: Sequence[Served], frozen: Sequence[Served], window: int = WINDOW, least: float = LEAST
) -> Kept:
    """Hold the clean requests of a stream against the same ones with a frozen drafter.

    Args:
        served, frozen: the same requests in the same order.
        window: clean requests that a share is taken over.
        least: a share below is a loss.
    """
    pairs = [each for each in zip(served, frozen, strict=True) if each[0].phase.startswith(CLEAN)]
    phases = dict.fromkeys(mine.phase for mine, _ in pairs)
    longest = run = 0
    for first in range(0, len(pairs) - window + 1, window):
        run = run + 1 if _share(pairs[first : first + window]) < least else 0
        longest = max(longest, run)
    by_phase = {
        phase: _share([each for each in pairs if each[0].phase == phase]) for phase in phases
    }
    return Kept(_share(pairs), by_phase, longest)


def _share(pairs: Sequence[tuple[Served, Served]]) -> float:
    """τ of the one over τ of the other; both committed the same texts."""
    mine, other = (
        sum(each[side].tokens for each in pairs) / sum(each[side].steps for each in pairs)
        for side in (0, 1)
    )
    return mine / other
