"""Sets of questions, the order in which they are asked, and their prompts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from vllm_specblock.bench.config import BenchConfig, BenchError
from vllm_specblock.train.data.chat import BrokenLine
from vllm_specblock.train.data.chat_tokens import ChatTokens


@dataclass(frozen=True)
class Question:
    """A chat's user turns; an answer precedes each but the first."""

    id: str
    turns: tuple[str, ...]


Sets = dict[str, list[Question]]


def read_sets(config: BenchConfig) -> Sets:
    """Return the chosen questions of every set, in the order of the options.

    Raises:
        BenchError: a file is missing or has a line without a question, or two sets have one name.
    """
    found: Sets = {}
    for given in config.set:
        name, equals, path = given.partition("=")
        where = Path(path if equals else given)
        files = sorted(where.glob("*.jsonl")) if where.is_dir() else [where]
        if not files:
            raise BenchError(f"There is no .jsonl file in the folder {where}.")
        if not files[0].is_file():
            raise BenchError(f"There is no set of questions {where}.")
        for file in files:
            own = name if equals and file == where else file.stem
            if own in found:
                raise BenchError(f"Two sets are called {own}: give one as --set OTHER={file}.")
            found[own] = spread(read_questions(file), config.questions)
    return found


def read_questions(path: Path) -> list[Question]:
    """Return all questions of a .jsonl file: lines of {"id", "turns"}, or of {"prompt"}."""
    found = []
    # Not `splitlines`: a JSON string may hold other ends of a line, such as U+2028.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError:  # no JSON, or not UTF-8
            raw = None
        raw = raw if isinstance(raw, dict) else {}
        turns = raw.get("turns", [raw.get("prompt")])
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise BenchError(
                f'Line {number} of {path} is no question: it must be like {{"id": "a", "turns": '
                '["How are you?"]}.'
            )
        found.append(Question(str(raw.get("id", number)), tuple(turns)))
    if not found:
        raise BenchError(f"There is no question in {path}.")
    if len({question.id for question in found}) < len(found):
        raise BenchError(f"Two questions of {path} have one id.")
    return found


def spread(questions: list[Question], count: int | None) -> list[Question]:
    """Return `count` questions, evenly spread; None: all."""
    if count is None or count >= len(questions):
        return questions
    return [questions[index * len(questions) // count] for index in range(count)]


def seed_of(name: str, question: Question, turn: int, seed: int) -> int:
    """Return the seed of one answer: the same for all methods and rounds."""
    return (zlib.crc32(f"{name}/{question.id}/{turn}".encode()) + seed) % 2**31


@dataclass(frozen=True)
class Unit:
    """All turns of a batch of questions: each engine answers them before the next unit."""

    round: int
    temperature: float
    set: str
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """Name in the store."""
        ids = ",".join(question.id for question in self.questions)
        return f"round {self.round}, T = {self.temperature:g}, {self.set}/{ids}"

    @property
    def turns(self) -> int:
        """Number of turns, the same in all questions."""
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


class Reader:
    """Makes prompts, as token ids.

    Args:
        raw: no chat template: answers and turns continue one text.

    Raises:
        BenchError: there is no chat template.
    """

    def __init__(self, tokens: ChatTokens, raw: bool) -> None:
        if not raw and not tokens.chat:
            raise BenchError(
                "The target has no chat template: use --raw to continue the questions as text."
            )
        self.tokens, self.raw = tokens, raw

    def prompt(self, question: Question, answers: Sequence[list[int]]) -> list[int]:
        """Return the prompt of the turn after `answers`.

        Raises:
            BenchError: the template refuses it.
        """
        turns, said = question.turns[: len(answers) + 1], [*map(self.tokens.said, answers)]
        try:
            if self.raw:
                return self.tokens.raw("".join(map("".join, zip(turns, [*said, ""]))))
            messages = [{"role": "user", "content": turns[0]}]
            for answer, turn in zip(said, turns[1:]):
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": turn})
            return self.tokens.question(messages)
        except BrokenLine as error:
            raise BenchError(f"Question {question.id} cannot be asked: {error}.") from None

    def needed(self, sets: Sets, max_new_tokens: int) -> int:
        """Return the tokens of the longest chat; an answer may grow when it is encoded again."""
        most = 0
        for question in (each for questions in sets.values() for each in questions):
            before = len(question.turns) - 1
            last = len(self.prompt(question, [[]] * before)) + before * (max_new_tokens * 5 // 4)
            most = max(most, last + max_new_tokens)
        return -(-(most + 1) // 64) * 64
