"""Paired comparison of versions on recorded texts.

A version's depth at a row is the number of tokens that its chain shares with the text, plus one if
the next token is among the following three choices (a tree's siblings). Versions are compared by
steps per token, 1 / (1 + depth): mean depths would favour texts of high τ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev, variance
from weakref import WeakKeyDictionary

import torch

from vllm_specblock.adapt.book import Book, Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.policy.actions import put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.eval.chain import chain_along
from vllm_specblock.train.learner import EvalSequence

SURE, GROWTH = 1.0, 0.25
"""Standard errors by which the first version must be better, and the exponent of their growth with
the compared versions: one in six equal versions is a standard error ahead by chance. After sixteen
it takes two."""

NEWEST = 8
"""Records of each part of the book to judge by."""

_SIBLING = 1
"""The rank bucket of second to fourth choices; 0 is the first."""


@torch.no_grad()
def depth_along(drafter: SpecBlockModel, sequence: EvalSequence, blocks: int) -> float:
    """Return the mean depth over the rows of a text's answer, tokens; NaN: the text is too short.
    blocks: M of the chain."""
    if len(sequence.tokens) <= sequence.prompt + 1:
        return math.nan
    chain = chain_along(drafter, sequence, blocks)
    on_chain = chain.on_chain
    sibling = on_chain & ~chain.hit & (chain.rank == _SIBLING)
    return float(((on_chain & chain.hit) | sibling).sum(1).float().mean())


class Judge:
    """Depths of versions on records; each pair is computed once. blocks: M of the chains."""

    def __init__(self, drafter: SpecBlockModel, teacher: RecordTeacher, blocks: int) -> None:
        self.drafter = copy.deepcopy(drafter).requires_grad_(False)
        self.teacher, self.blocks = teacher, blocks
        self._holds: Version | None = None
        self._known: WeakKeyDictionary[Record, dict[int, float]] = WeakKeyDictionary()

    def depth(self, version: Version, record: Record) -> float:
        """See `depth_along`."""
        known = self._known.setdefault(record, {})
        if version.number not in known:
            if self._holds is not version:
                before = None if self._holds is None else self._holds.tensors
                put(self.drafter, version.tensors, before)
                self._holds = version
            text = self.teacher.sequence(record)
            known[version.number] = depth_along(self.drafter, text, self.blocks)
        return known[version.number]

    def steps(self, version: Version, record: Record) -> float:
        """Steps per token: 1 / (1 + depth)."""
        return steps_of(self.depth(version, record))

    def difference(self, version: Version, other: Version, book: Book) -> float:
        """Return the mean of version − other over recent and old judged records, with equal weight,
        tokens per row; NaN: there is none."""
        parts = self._parts(lambda each: self.depth(version, each) - self.depth(other, each), book)
        return fmean(map(fmean, parts)) if parts else math.nan

    def is_better(self, version: Version, other: Version, book: Book, count: int = 1) -> bool:
        """Return whether a version saves steps by more than chance, on the recent and the old
        judged records with equal weight. count: versions compared on texts of this domain, this
        one included."""
        saved = self._parts(lambda each: self.steps(other, each) - self.steps(version, each), book)
        return is_sure(saved, SURE * count**GROWTH)

    def _parts(self, measure: Callable[[Record], float], book: Book) -> list[list[float]]:
        """Values of the recent and of the old judged records, without empty lists."""
        found = []
        for part in (book.recent.records, book.old.records):
            newest = part[-NEWEST:]
            found.append([each for each in map(measure, newest) if not math.isnan(each)])
        return [each for each in found if each]


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


def steps_of(depth: float) -> float:
    """Return target steps per token for a depth in tokens."""
    return 1 / (1 + depth)


def is_sure(parts: Sequence[Sequence[float]], errors: float = SURE) -> bool:
    """Return whether the mean of the parts' means is above 0 by so many standard errors. The spread
    of these paired differences is pooled, so a part may hold a single one."""
    degrees = sum(len(part) - 1 for part in parts)
    if not degrees:
        return False
    squares = sum((len(part) - 1) * variance(part) for part in parts if len(part) > 1)
    error = math.sqrt(squares / degrees * sum(1 / len(part) for part in parts)) / len(parts)
    return fmean(map(fmean, parts)) > errors * error
