"""Conversations answered anew by the target, many at a time, turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_specblock.train.data.chat import BrokenLine, Message
from vllm_specblock.train.data.chat_tokens import ChatTokens


class Answerer(Protocol):
    """The target, as something that answers."""

    def generate(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_tokens: list[int],
        seeds: list[int],
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        """Answers as token ids, with the end token where one was generated.

        `stops` are ids that end an answer beside the target's own.
        """
        ...

    def forget(self) -> None:
        """Let later answers not depend on earlier calls, not even in their last bits."""
        ...


@dataclass
class Dialogue:
    """One conversation while its answers are being written.

    Attributes:
        tokens: the target's tokenizer and template.
        questions: a system turn, if any, and the user turns: each of these gets an answer.
        number: of the conversation in its data set; seeds its sampling.
        max_length: most tokens of the whole.
        raw: the question is text to go on with, not a turn.
        ids, loss_mask: what there is so far, and which of it the target wrote.
        cut: it ended before its last question, because the template writes the past otherwise
            than it happened.
        broken: why it cannot be used at all, if so.
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
        """The next question's tokens, all of the past included; None when it is over."""
        try:
            return self._question()
        except BrokenLine as reason:
            self.broken = reason
            return None

    def _question(self) -> list[int] | None:
        while self.questions and self.questions[0]["role"] == "system":
            self._past.append(self.questions.pop(0))
        if not self.questions:
            return None
        self._past.append(self.questions.pop(0))
        content = self._past[-1]["content"]
        ids = self.tokens.raw(content) if self.raw else self.tokens.question(self._past)
        if ids[: len(self.ids)] != self.ids:
            self.cut = True
            return None
        if 0 < len(ids) < self.max_length:
            return ids
        if not self.ids:
            raise BrokenLine(
                f"its question has {len(ids):,} tokens, which leaves no room for an answer"
            )
        return None

    def hear(self, question: list[int], answer: list[int]) -> None:
        """Take the answer to what `ask` gave."""
        self.loss_mask += [False] * (len(question) - len(self.ids)) + [True] * len(answer)
        self.ids = question + answer
        self._turn += 1
        if self.questions:
            self._past.append({"role": "assistant", "content": self.tokens.said(answer)})

    def seed(self, seed: int) -> int:
        """Of the sampling of the coming answer: a function of run, conversation and turn."""
        digest = hashlib.sha256(f"{seed}/{self.number}/{self._turn}".encode()).digest()
        return int.from_bytes(digest[:4]) >> 1


def answer(
    dialogues: Sequence[Dialogue],
    answerer: Answerer,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    over: Callable[[int], object],
) -> None:
    """Write all answers of all dialogues; each turn is one batch.

    Args:
        temperatures: conversation n takes the n-th, going round.
        max_new_tokens: of one answer.
        over: told how many dialogues came to their end.
    """
    answerer.forget()
    open_ = list(dialogues)
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
            [min(max_new_tokens, d.max_length - len(question)) for d, question in turn],
            [dialogue.seed(seed) for dialogue in open_],
        )
        for (dialogue, question), ids in zip(turn, answers, strict=True):
            dialogue.hear(question, ids)
