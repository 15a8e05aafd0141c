"""Earlier occurrences of a text's end, for many texts in one launch: the n-gram drafter's search.

The reference is in `continuations_numba.py`. Each text is searched as if E earlier tokens, the
same for all, stood before it; no match reaches across that border. A program searches one stretch
of one text; stretches past the text's end are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import cdiv, jit, strides_of, tl

_STRETCH = 1024  # places of a program
_MOST_KEYS = 4096  # of a request; the reading kernel holds all in registers


class Texts(NamedTuple):
    """R texts, each a prefix of a table row."""

    table: torch.Tensor  # [S, width] int32, rows are contiguous
    row: torch.Tensor  # [R] int64, each text's row
    position: torch.Tensor  # [T] int64, indices of the tokens before texts' last ones
    last: torch.Tensor  # [R] int64: text r has position[last[r]] + 2 tokens; any value is safe
    earlier: torch.Tensor  # [E] int32, other texts, −1 after each; contiguous

    @property
    def width(self) -> int:
        """Maximum tokens of a text."""
        return self.table.shape[1]

    @property
    def places(self) -> int:
        """Places to search at most: E + width."""
        return len(self.earlier) + self.width


class Following(NamedTuple):
    """Settings of the continuations; compile-time constants of the kernels."""

    min_match: int  # this and the next two: see `NGramConfig`
    max_match: int
    branches: int  # B
    depth: int  # D, tokens per continuation
    budget: int  # N
    vote: float  # VOTE of `drafters/ngram/drafter.py`
    power: float  # POWER, likewise
    votes: int  # votes are multiples of 1 / votes
    nats: int  # scores are multiples of 1 / nats

    @property
    def candidates(self) -> int:
        """C, the root included."""
        return 1 + self.branches * self.depth


def stretch_of(places: int, branches: int) -> int:
    """Return the places that one program searches."""
    stretch = _STRETCH
    while cdiv(places, stretch) * branches > _MOST_KEYS:
        stretch *= 2
    return stretch


def occurrences_triton(texts: Texts, how: Following) -> torch.Tensor:
    """Return the best places of every stretch.

    Returns:
        [R, stretches, branches] int32, descending per stretch: place + places · (matching tokens
        backwards from there and from the text's end), or −1; a text begins at place E.
        Uninitialised for stretches from a text's last token on.
    """
    count, stretch = len(texts.row), stretch_of(texts.places, how.branches)
    stretches = cdiv(texts.places, stretch)
    found = texts.table.new_empty(count, stretches, how.branches)
    _occurrences_kernel[(count, stretches)](
        *texts,
        strides_of(texts),
        texts.width,
        len(texts.earlier),
        found,
        HOW=how,
        STRETCH=stretch,
        num_warps=4 if stretch == _STRETCH else 8,
    )
    return found


@jit
def length_of(position_ptr, last_ptr, strides, request):
    """Return the tokens of one text, int32; clamped, since padding rows are arbitrary."""
    newest = tl.load(last_ptr + request * strides.last).to(tl.int64)
    stands = tl.load(position_ptr + newest * strides.position)
    return tl.minimum(tl.maximum(stands, -2), 0x3FFFFFFF).to(tl.int32) + 2


@jit(do_not_specialize=["row_ptr", "position_ptr", "last_ptr", "earlier_ptr"])
def _occurrences_kernel(
    table_ptr,  # [S, width] int32
    row_ptr,  # [R] int64
    position_ptr,  # [T] int64
    last_ptr,  # [R] int64
    earlier_ptr,  # [E] int32
    strides,  # Texts, their strides
    width,
    begin,  # E, the place of a text's first token
    found_ptr,  # [R, stretches, B] int32
    HOW: tl.constexpr,  # Following
    STRETCH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = length_of(position_ptr, last_ptr, strides, request)
    first = tl.program_id(1) * STRETCH
    if first < begin + length - 1:
        text = table_ptr + tl.load(row_ptr + request * strides.row).to(tl.int64) * strides.table
        place = first + tl.arange(0, STRETCH)
        own = place >= begin
        # How far back a match may reach.
        reach = tl.minimum(tl.where(own, place - begin, place), length - 1)
        agrees = place < begin + tl.minimum(length - 1, width)
        count = tl.zeros([STRETCH], tl.int32)
        MOST: tl.constexpr = HOW.max_match  # see `optional_triton.py`
        for back in tl.static_range(MOST):
            # A length beyond the table is padding, and reads the last column.
            end = tl.load(text + tl.minimum(tl.maximum(length - 1 - back, 0), width - 1))
            there = (reach >= back) & (place < begin + width)
            said = tl.load(text + place - back - begin, mask=there & own, other=0)
            other = tl.load(earlier_ptr + place - back, mask=there & (place < begin), other=0)
            agrees = agrees & there & (tl.where(own, said, other) == end)
            count += agrees.to(tl.int32)
        key = tl.where(count < HOW.min_match, -1, place + count * (begin + width))
        found_ptr += (request * tl.num_programs(1) + tl.program_id(1)) * HOW.branches
        for b in range(HOW.branches):
            best = tl.max(key, 0)
            tl.store(found_ptr + b, best)
            key = tl.where(key == best, -1, key)
