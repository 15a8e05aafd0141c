"""Sets of questions, the order in which they are asked, and their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
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
    """Return the chosen questions of every set; raises BenchError if one cannot be read."""
    found: Sets = {}
    for given in config.set:
        name, equals, path = given.partition("=")
        folder = {file.stem: file for file in sorted(Path(given).glob("*.jsonl"))}
        files = {name: Path(path)} if equals else folder
        if not files or not all(file.is_file() for file in files.values()):
            raise BenchError(f"The set {given} is neither NAME=FILE nor a folder of .jsonl files.")
        for own, file in files.items():
            if own in found:
                raise BenchError(f"Two sets are called {own}: give one as --set OTHER={file}.")
            questions = read_questions(file)
            count = min(config.questions or len(questions), len(questions))
            found[own] = [questions[i * len(questions) // count] for i in range(count)]
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
                f'Line {number} of {path} is not a question: it must be like {{"id": "a", "turns": '
                '["How are you?"]}.'
            )
        found.append(Question(str(raw.get("id", number)), tuple(turns)))
    if not found:
        raise BenchError(f"{path} has no questions.")
    if len({question.id for question in found}) < len(found):
        raise BenchError(f"Two questions of {path} have the same id.")
    return found


@dataclass(frozen=True)
class Unit:
    """All turns, as many in each, of a batch of questions: what an engine answers in its turn."""

    round: int
    temperature: float
    set: str
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """Name in the store."""
        ids = ",".join(question.id for question in self.questions)
        return f"round {self.round}, T = {self.temperature:g}, {self.set}/{ids}"


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
    for _, group in groupby(questions, lambda question: len(question.turns)):
        same = tuple(group)
        yield from (same[first : first + size] for first in range(0, len(same), size))


class Reader:
    """Makes prompts, as token ids; `raw`: answers and turns continue one text.

    Raises BenchError if there is no chat template, or if it refuses a question.
    """

    def __init__(self, tokens: ChatTokens, raw: bool) -> None:
        if not raw and not tokens.chat:
            raise BenchError(
                "The target has no chat template: use --raw to continue the questions as text."
            )
        self.tokens, self.raw = tokens, raw

    def prompt(self, question: Question, answers: Sequence[list[int]]) -> list[int]:
        """Return the prompt of the turn after `answers`."""
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
