"""Attacked streams: half of the requests try to make the drafter worse for all others.

The goal: other requests keep the speed that they had without adaptation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.simulation import Served
from lib.streams import HOME, Place
from vllm_specblock.train.learner import EvalSequence

ATTACKS = ("random", "loop", "scaled")
"""Answers at a high temperature to random prompts; texts that repeat a few tokens; texts of home
whose features are too large. Their domains follow home in this order."""
TIMES = 10.0
"""Factor on features that are too large."""
CLEAN = "clean"
"""Prefix of the phases of requests that do not attack."""
LEAST = 0.98
"""A share below it is a loss."""
WINDOW = 8
"""Clean requests that a share is taken over."""


def attacked(length: int) -> list[Place]:
    """A fifth clean, a fifth for each attack, every other request, a fifth clean; all texts new."""
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


def scaled(sequence: EvalSequence) -> EvalSequence:
    return replace(sequence, hidden=TIMES * sequence.hidden, last=TIMES * sequence.last)


@dataclass(frozen=True)
class Kept:
    """Share of a frozen drafter's τ that clean requests keep, of all and per phase; longest: most
    windows in a row whose share is below `LEAST`."""

    share: float
    by_phase: dict[str, float]
    longest: int


def kept(served: Sequence[Served], frozen: Sequence[Served]) -> Kept:
    """Compare the clean requests of a stream, in order, with the same ones of a frozen drafter."""
    pairs = [each for each in zip(served, frozen, strict=True) if each[0].phase.startswith(CLEAN)]
    phases = dict.fromkeys(mine.phase for mine, _ in pairs)
    longest = run = 0
    for first in range(0, len(pairs) - WINDOW + 1, WINDOW):
        run = run + 1 if _share(pairs[first : first + WINDOW]) < LEAST else 0
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
