"""One training shard from lines of chat data."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from tqdm import tqdm

from vllm_specblock.train.data.answering import Answerer, Dialogue, answer
from vllm_specblock.train.data.chat import BrokenLine, Conversation, Document, Entry, Line, Lines
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.data.options import DataOptions
from vllm_specblock.train.data.shards import Text


def report(reason: str) -> None:
    """Say why a line is not used, beside the progress bar."""
    tqdm.write(reason, file=sys.stderr)


class ShardMaker:
    """Makes any shard of one data set.

    Args:
        options: see `DataOptions`.
        lines: the usable ones.
        tokens: the target's tokenizer and template.
        target: the target, started by the first call; called by shards with something to answer.
    """

    def __init__(
        self,
        options: DataOptions,
        lines: Lines,
        tokens: ChatTokens,
        target: Callable[[], Answerer],
    ) -> None:
        self.options, self.lines, self.tokens, self.target = options, lines, tokens, target

    def make(
        self, first: int, count: int, done: Callable[[int], object]
    ) -> tuple[list[Text], dict[str, int]]:
        """The sequences of usable lines first .. first + count - 1, in their order.

        `done` is told how many more lines are done. Also gives how many conversations were `cut`
        and how many lines were `skipped`.
        """
        lines = self.lines.usable[first : first + count]
        facts = {"cut": 0, "skipped": 0}
        made: list[list[Text] | Dialogue] = []
        for offset, (line, entry) in enumerate(zip(lines, self.lines.read(lines))):
            try:
                made.append(self._make(first + offset, entry, facts))
            except BrokenLine as reason:
                made.append([])
                self._skip(line, reason, facts)
        dialogues = [each for each in made if isinstance(each, Dialogue)]
        done(count - len(dialogues))
        if dialogues:
            answer(
                dialogues,
                self.target(),
                temperatures=self.options.temperature,
                max_new_tokens=self.options.max_new_tokens,
                seed=self.options.seed,
                over=done,
            )
        texts: list[Text] = []
        for line, each in zip(lines, made):
            if not isinstance(each, Dialogue):
                texts += each
            elif each.broken:
                self._skip(line, each.broken, facts)
            else:
                facts["cut"] += each.cut
                texts.append(_text(each.ids, each.loss_mask))
        return texts, facts

    def _make(self, number: int, entry: Entry, facts: dict[str, int]) -> list[Text] | Dialogue:
        """The finished sequences of a line, or a dialogue that is to be answered."""
        tokens, most = self.tokens, self.options.max_length
        if isinstance(entry, Document):
            ids = tokens.document(entry.text)
            return [_text(ids[at : at + most]) for at in range(0, len(ids), most)]
        if self.options.answers == "keep":
            if not isinstance(entry, Conversation):
                raise BrokenLine("it is a prompt without an answer to keep")
            kept = tokens.kept(entry.messages)
            if not any(kept.loss_mask[:most]):
                raise BrokenLine(f"its first answer lies past max_length = {most:,} tokens")
            facts["cut"] += kept.cut
            return [_text(kept.ids[:most], kept.loss_mask[:most])]
        if isinstance(entry, Conversation):
            questions = [turn for turn in entry.messages if turn["role"] != "assistant"]
            return Dialogue(tokens, questions, number, most)
        raw = self.options.raw_prompts or not tokens.chat
        return Dialogue(tokens, [{"role": "user", "content": entry.text}], number, most, raw=raw)

    def _skip(self, line: Line, reason: BrokenLine, facts: dict[str, int]) -> None:
        facts["skipped"] += 1
        report(f"{self.lines.where(line)}: {reason}")


def _text(ids: list[int], loss_mask: list[bool] | None = None) -> Text:
    """Lists as tensors; all is counted by default."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    return Text(tokens, torch.tensor([True] * len(ids) if loss_mask is None else loss_mask))
