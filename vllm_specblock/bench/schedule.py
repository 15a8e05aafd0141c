"""Who answers what, and when: engines take turns, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.bench.methods import Method
from vllm_specblock.bench.questions import Question, Sets

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """What every engine answers before any goes on: one turn of a batch of questions.

    Attributes:
        turn: of the chat, from 0 on.
        last: no turn of these questions comes after it.
    """

    round: int
    temperature: float
    set: str
    questions: tuple[Question, ...]
    turn: int
    last: bool

    def key(self, turn: int | None = None) -> str:
        """Its name in the store, or that of another turn of the same questions."""
        ids = ",".join(question.id for question in self.questions)
        turn = self.turn if turn is None else turn
        return f"round {self.round}, T = {self.temperature:g}, {self.set}/{ids}, turn {turn}"


def units(config: BenchConfig, sets: Sets) -> Iterator[Unit]:
    """All units: rounds one after the other, and in each the sets by turns, so that whatever is
    there of a round is of all sets."""
    for number in range(config.rounds):
        batches = {name: list(_batches(each, config.batch)) for name, each in sets.items()}
        for place in range(max(map(len, batches.values()))):
            for name, those in batches.items():
                for temperature in config.temperature:
                    if place < len(those):
                        turns = len(those[place][0].turns)
                        for turn in range(turns):
                            yield Unit(
                                number, temperature, name, those[place], turn, turn == turns - 1
                            )


def _batches(questions: Sequence[Question], size: int) -> Iterator[tuple[Question, ...]]:
    """Up to `size` questions each, all of them with as many turns."""
    batch: tuple[Question, ...] = ()
    for question in questions:
        if batch and (len(batch) == size or len(batch[0].turns) != len(question.turns)):
            yield batch
            batch = ()
        batch += (question,)
    yield batch


def groups(
    plain: Sequence[Method], others: Sequence[Method], at_once: int | None
) -> list[list[Method]]:
    """Lists of methods whose engines are alive together: plain vLLM is in every one, or a ratio
    would be of two times of day.

    Raises:
        BenchError: plain vLLM leaves no room for another.
    """
    room = len(others) if at_once is None else at_once - len(plain)
    if others and room < 1:
        raise BenchError(
            f"--at-once is {at_once}, but must be at least {len(plain) + 1}: plain vLLM is "
            f"{len(plain)} engines, and one that is compared."
        )
    firsts = range(0, len(others), max(1, room)) or [0]
    return [[*plain, *others[first : first + room]] for first in firsts]


def rotated(those: Sequence[T], by: int) -> list[T]:
    """Another one first every time: nobody always comes after the same one."""
    start = by % len(those) if those else 0
    return [*those[start:], *those[:start]]
