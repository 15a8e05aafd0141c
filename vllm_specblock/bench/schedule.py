"""The order of answers: engines take turns, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.bench.methods import Method
from vllm_specblock.bench.questions import Question, Sets

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """All turns of a batch of questions: each engine answers them before the next unit."""

    round: int
    temperature: float
    set: str
    questions: tuple[Question, ...]

    def key(self) -> str:
        """Return its name in the store."""
        ids = ",".join(question.id for question in self.questions)
        return f"round {self.round}, T = {self.temperature:g}, {self.set}/{ids}"

    @property
    def turns(self) -> int:
        return len(self.questions[0].turns)


def units(config: BenchConfig, sets: Sets) -> Iterator[Unit]:
    """Yield all units: round by round, and in each round one batch of each set in turn."""
    for number in range(config.rounds):
        batches = [list(_batches(each, config.batch)) for each in sets.values()]
        for row in zip_longest(*batches):
            for name, batch in zip(sets, row):
                for temperature in config.temperature if batch else ():
                    yield Unit(number, temperature, name, batch)


def _batches(questions: Sequence[Question], size: int) -> Iterator[tuple[Question, ...]]:
    """Yield up to `size` questions with the same number of turns."""
    batch: tuple[Question, ...] = ()
    for question in questions:
        if batch and (len(batch) == size or len(batch[0].turns) != len(question.turns)):
            yield batch
            batch = ()
        batch += (question,)
    yield batch


def groups(methods: Sequence[Method], at_once: int | None) -> list[list[Method]]:
    """Return lists of methods whose engines run together, each with plain vLLM.

    Raises:
        BenchError: plain vLLM leaves no room for another.
    """
    plain = [method for method in methods if method.plain]
    others = [method for method in methods if not method.plain]
    room = len(others) if at_once is None else at_once - len(plain)
    if others and room < 1:
        raise BenchError(
            f"--at-once is {at_once}, but must be at least {len(plain) + 1}: {len(plain)} for "
            "plain vLLM and one for a method to compare."
        )
    firsts = range(0, len(others), max(1, room)) or [0]
    return [[*plain, *others[first : first + room]] for first in firsts]


def rotated(those: Sequence[T], by: int) -> list[T]:
    """Return the sequence rotated by one more item each time, so that the order is fair."""
    start = by % len(those) if those else 0
    return [*those[start:], *those[:start]]
