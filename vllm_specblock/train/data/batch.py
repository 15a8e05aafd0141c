"""Training batch: windows, each packed with one or more documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = -1
"""Padding token after the last document of a window."""


class Segment(NamedTuple):
    """Source of one document of a window: index of the sequence in its data set, first token
    there, and number of tokens."""

    sequence: int
    start: int
    length: int


Sources = tuple[tuple[Segment, ...], ...]


def segments_of(sequences: Iterable[Tensor], length: int) -> Iterator[Segment]:
    """Return consecutive pieces of at most `length` tokens, as for stored features."""
    for number, tokens in enumerate(sequences):
        for start in range(0, len(tokens), length):
            yield Segment(number, start, min(length, len(tokens) - start))


@dataclass(frozen=True)
class Batch:
    """B windows of L columns. Documents of a window are consecutive and independent.

    Attributes (each [B, L]):
        tokens: int64 target ids, `NO_TOKEN` past the last document.
        position: int64, 0-based column within the document, 0 past the last one.
        loss_mask: bool, the target generated the token: it is trained on.
        segments: per window, the sources of its documents.
    """

    tokens: Tensor
    position: Tensor
    loss_mask: Tensor
    segments: Sources = ()

    @classmethod
    def of(cls, tokens: Tensor, loss_mask: Tensor | None = None, first: int = 0) -> Batch:
        """One document per window. tokens [B, L] int64, `NO_TOKEN` at the end of short ones;
        loss_mask [B, L] bool (default: all); first: index of the first document's sequence."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        inside = tokens >= 0
        return cls(
            tokens,
            torch.where(inside, column, 0),
            inside if loss_mask is None else inside & loss_mask,
            tuple((Segment(i, 0, n),) for i, n in enumerate(inside.sum(1).tolist(), first)),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> Batch:
        tensors = (self.tokens, self.position, self.loss_mask)
        tokens, position, loss_mask = (values.to(device) for values in tensors)
        return Batch(tokens, position, loss_mask, self.segments)

    @cached_property
    def document(self) -> Tensor:
        """Return the number of each column's document in its window, [B, L] int64; each column past
        the last document has a number of its own."""
        return (self.position == 0).cumsum(1) - 1

    def at(self, values: Tensor, row: Tensor, place: Tensor, missing: int) -> Tensor:
        """values [B, L] at columns `place` [B, n], or `missing` where `place` lies past the
        window or in another document than column `row` [B, n]."""
        column = place.clamp(max=self.tokens.shape[1] - 1)
        same = self.document.gather(1, column) == self.document.gather(1, row)
        return values.gather(1, column).where(same & (place == column), missing)
