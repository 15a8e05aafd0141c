"""Regeneration of conversations by the target, in batches of turns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_specblock.train.config import DataOptions
from vllm_specblock.train.data.chat import BrokenLine, Message
from vllm_specblock.train.data.chat_tokens import ChatTokens


class Answerer(Protocol):
    """The target as a generator of answers.

    generate: prompts -> answers as token ids, with the end token if generated.
    forget: clear caches, so that later answers are bitwise independent of earlier calls.
    """

    def generate(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_tokens: list[int],
        seeds: list[int],
    ) -> list[list[int]]: ...

    def forget(self) -> None: ...


@dataclass
class Dialogue:
    """One conversation of at most `max_length` tokens while its answers are generated.

    questions: a system turn, if any, and the user turns, each of which gets an answer.
    number: index in the data set; seeds the sampling.
    raw: the question is text to continue, not a turn.
    ids, loss_mask: tokens so far, and which of them the target generated.
    cut: it ended early, because the template rewrites past turns.
    broken: why it cannot be used.
    """

    tokens: ChatTokens
    questions: list[Message]
    number: int
    max_length: int
    raw: bool = False
    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    cut: bool = False
    broken: BrokenLine | None = None
    _past: list[Message] = field(default_factory=list)
    _turn: int = 0

    def ask(self) -> list[int] | None:
        """Return the next question's tokens with all turns before it; None: no more questions."""
        while self.questions and self.questions[0]["role"] == "system":
            self._past.append(self.questions.pop(0))
        if not self.questions:
            return None
        self._past.append(self.questions.pop(0))
        content = self._past[-1]["content"]
        try:
            ids = self.tokens.raw(content) if self.raw else self.tokens.question(self._past)
        except BrokenLine as reason:
            self.broken = reason
            return None
        if ids[: len(self.ids)] != self.ids:
            self.cut = True
            return None
        if 0 < len(ids) < self.max_length:
            return ids
        if not self.ids:
            self.broken = BrokenLine(
                f"its question has {len(ids):,} tokens, which leaves no room for an answer"
            )
        return None

    def hear(self, question: list[int], answer: list[int]) -> None:
        """Add a question and its answer."""
        self.loss_mask += [False] * (len(question) - len(self.ids)) + [True] * len(answer)
        self.ids = question + answer
        self._turn += 1
        if self.questions:
            self._past.append({"role": "assistant", "content": self.tokens.said(answer)})

    def seed(self, seed: int) -> int:
        """Sampling seed of the next answer, 31 bits."""
        name = f"{seed}/{self.number}/{self._turn}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) >> 1


def answer(
    dialogues: Sequence[Dialogue],
    answerer: Answerer,
    options: DataOptions,
    over: Callable[[int], object],
) -> None:
    """Write all answers of all dialogues; each turn is one batch. Conversation n takes temperature
    n modulo their count; `over` is called with the number of dialogues that ended."""
    answerer.forget()
    open_, temperatures = list(dialogues), options.temperature
    while open_:
        asked = [(dialogue, dialogue.ask()) for dialogue in open_]
        turn = [(dialogue, question) for dialogue, question in asked if question is not None]
        over(len(open_) - len(turn))
        open_ = [dialogue for dialogue, _ in turn]
        if not turn:
            break
        answers = answerer.generate(
            [question for _, question in turn],
            [temperatures[dialogue.number % len(temperatures)] for dialogue in open_],
            [min(options.max_new_tokens, d.max_length - len(question)) for d, question in turn],
            [dialogue.seed(options.seed) for dialogue in open_],
        )
        for (dialogue, question), ids in zip(turn, answers, strict=True):
            dialogue.hear(question, ids)
