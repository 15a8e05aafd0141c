"""Training batches from records, without running the target."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding

from vllm_specblock.adapt.book import Book, Record
from vllm_specblock.train.data.batch import NO_TOKEN, Batch
from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.target.features import TargetOutputs

UNKNOWN = 0
"""Placeholder for the token of a record's first row, which is never read."""

PROMPT_ROWS, ROWS = 64, 256
"""Maximum rows of a prompt's end, and of a record."""


class RecordTeacher:
    """Builds batches of recorded rows.

    Args:
        embedding: [V, Ht], the target's.
        head: [Vd, Ht], the LM head's rows of the draft vocabulary.
        device: of the batches, which are fp32.
    """

    def __init__(self, embedding: Tensor, head: Tensor, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.embedding, self.head = self._rows(embedding), self._rows(head)

    def _rows(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, torch.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        """Target ids [...] int64 -> the target's own embeddings [..., Ht]."""
        return embedding(tokens, self.embedding)

    @torch.no_grad()
    def train_batch(self, records: Sequence[Record], step: int, seed: int) -> TrainBatch:
        """Return a batch with a window per record, at least one; step, seed: see `TrainBatch`."""
        columns = 1 + max(len(record.tokens) for record in records)
        tokens = torch.full((len(records), columns), NO_TOKEN)
        loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
        hidden = records[0].states.new_zeros(*tokens.shape, records[0].states.shape[1])
        last = records[0].last.new_zeros(*tokens.shape, records[0].last.shape[1])
        for window, record in enumerate(records):
            rows = len(record.tokens)
            tokens[window, 0] = UNKNOWN
            tokens[window, 1 : rows + 1] = record.tokens
            loss_mask[window, 1 : rows + 1] = record.labels
            hidden[window, :rows], last[window, :rows] = record.states, record.last
        hidden, last = self._rows(hidden), self._rows(last)
        batch = Batch.of(tokens, loss_mask).to(self.device)
        target_outputs = TargetOutputs(hidden, last, self.head)
        return TrainBatch(batch, target_outputs, self.embed, step, seed)

    def sequence(self, record: Record) -> EvalSequence:
        """Return a record as a text to draft along; its prompt ends before the first label."""
        tokens = torch.cat([record.tokens.new_tensor([UNKNOWN]), record.tokens])
        prompt = 1 + int(record.labels.byte().argmax())
        states, last = self._rows(record.states), self._rows(record.last)
        return EvalSequence(tokens.to(self.device), prompt, states, last, self.embed)


def batches(book: Book, count: int, rehearse: bool = True) -> list[list[Record]]:
    """Take the batches of one update from the book, with up to `count` new records.

    A batch has a new record and an old one, if there is one, both drawn by `Record.weight`: on a
    new domain, eight steps of two teach more than two steps of eight, in the same time. Without
    `rehearse`, each new record is a batch.
    """
    book.pass_over(count)
    old = book.reservoir.sample(min(count, len(book.new))) if rehearse else []
    new = book.take(count)
    if rehearse and new:
        new = spread(new, book.draw.random())
    return [[each, *old[number : number + 1]] for number, each in enumerate(new)]


def spread(records: Sequence[Record], offset: float) -> list[Record]:
    """Resample one or more records by weight, in order, by systematic sampling; offset: position of
    the first draw, uniform in [0, 1)."""
    ends = list(accumulate(each.weight for each in records))
    draws = ((number + offset) * ends[-1] / len(records) for number in range(len(records)))
    # Rounding may move a draw to the end.
    return [records[min(bisect(ends, draw), len(records) - 1)] for draw in draws]
