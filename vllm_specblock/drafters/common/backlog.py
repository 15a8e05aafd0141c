"""Committed tokens that paused drafters have missed, kept so that they can catch up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_specblock.drafters.interface import CommittedTokens

MOST_BYTES = 256 << 20
"""Of hidden states that are kept. 75,000 tokens of a target with 576 numbers a state in 16 bits
and a drafter that reads three layers; 10,000 of one with 4,096."""

_ROW = 64
"""Bytes of a row for its own sake."""


class MissedRows(NamedTuple):
    """What a step has committed, by request, as lists on the host.

    Attributes:
        req_idx: R request slots.
        states: L × [n, Ht].
        source: [T] int64, which of these rows each committed one is; None: they are the same.
        begin, length: R each, a request's committed rows among those T.
        position: R, of the first of them.
    """

    req_idx: list[int]
    states: tuple[Tensor, ...]
    source: Tensor | None
    begin: list[int]
    length: list[int]
    position: list[int]

    @classmethod
    def of(cls, rows: CommittedTokens) -> MissedRows:
        """Those of a step as drafters see it."""
        begin = rows.row_start_host[:-1]
        return cls(
            rows.req_idx.tolist(),  # a host tensor
            rows.states,
            rows.source,
            begin,
            [last + 1 - first for first, last in zip(begin, rows.last.tolist())],  # a host tensor
            rows.position[begin].tolist(),  # a host tensor
        )


class _Piece(NamedTuple):
    """Rows of one request in one step.

    states: L × [n, Ht], of all that was kept of that step; rows: which of them are this one's.
    position: of the first.
    """

    states: tuple[Tensor, ...]
    rows: slice
    position: int

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    def follows(self, pieces: list[_Piece]) -> bool:
        """Whether it goes on where these end."""
        return not pieces or pieces[-1].position + len(pieces[-1]) == self.position


class Backlog:
    """Committed rows that no drafter has advanced on, by request slot.

    On the host, step by step in Python: for devices whose memory is the host's.

    Args:
        most_bytes: of states; a step beyond that is not kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.pieces: dict[int, list[_Piece]] = {}
        self._rows: Counter[int] = Counter()

    def forget(self, req_idx: int) -> None:
        """The request in `kv_slot` is gone."""
        self._rows.pop(req_idx, None)
        for piece in self.pieces.pop(req_idx, []):
            self.bytes -= len(piece) * _row_bytes(piece.states)

    def rows(self, req_idx: int) -> int:
        """How many rows of the request in `kv_slot` are kept."""
        return self._rows[req_idx]

    def has_room(self, rows: int, states: Sequence[Tensor]) -> bool:
        """Whether there is memory for `rows` more rows of `states`."""
        return self.bytes + rows * _row_bytes(states) <= self.most_bytes

    def keep(self, rows: MissedRows, wanted: np.ndarray) -> np.ndarray:
        """Keep a step's rows of some requests.

        Args:
            rows: of the step, R requests.
            wanted: [R] bool.

        Returns:
            [R] bool, whose were kept. A request whose rows were not has lost what it had.
        """
        # Only what is kept is gathered: a piece holds its whole step's states.
        size, kept = _row_bytes(rows.states), wanted.copy()
        chosen: list[int] = []
        for r, (req_idx, begin, count) in enumerate(zip(rows.req_idx, rows.begin, rows.length)):
            kept[r] &= self.bytes + count * size <= self.most_bytes
            if kept[r]:
                self.bytes += count * size
                chosen += range(begin, begin + count)
            else:
                self.forget(req_idx)
        index = torch.tensor(chosen, dtype=torch.int64)
        source = index if rows.source is None else rows.source[index]
        states = tuple(state[source] for state in rows.states)
        first = 0
        for r in kept.nonzero()[0].tolist():  # a host array
            end, req_idx = first + rows.length[r], rows.req_idx[r]
            piece = _Piece(states, slice(first, end), rows.position[r])
            if not piece.follows(self.pieces.get(req_idx, [])):
                self.forget(req_idx)  # dummy batches share a slot
            self.pieces.setdefault(req_idx, []).append(piece)
            self._rows[req_idx] += len(piece)
            first = end
        return kept

    def catch_up(self, rows: CommittedTokens) -> CommittedTokens:
        """A step's rows with those before them that were kept; these are forgotten here."""
        if not self.pieces:
            return rows
        slots = rows.req_idx.tolist()  # a host tensor
        first = rows.position[rows.row_start_host[:-1]].tolist()  # a host tensor
        behind = []
        for req_idx, position in zip(slots, first):
            pieces = self.pieces.get(req_idx, [])
            end = position if not pieces else pieces[-1].position + len(pieces[-1])
            behind.append(pieces if end == position else [])  # rows in between were skipped
            self.forget(req_idx)
        if not any(behind):
            return rows
        # Kept states go behind the batch's own.
        there = len(rows.states[0]) if rows.states else 0
        kept: list[_Piece] = []
        source, position, places, cache_slot, token = [], [], [], [], []
        counts = [sum(map(len, pieces)) for pieces in behind]
        for r, (pieces, count) in enumerate(zip(behind, counts)):
            here = slice(rows.row_start_host[r], rows.row_start_host[r + 1])
            if pieces:
                kept += pieces
                place = torch.arange(pieces[0].position, pieces[0].position + count)
                index = place - (rows.position[here.start] - rows.index[here.start])
                block = rows.block_table[r, index.clamp(min=0) // rows.block_size].long()
                kv_slot = block * rows.block_size + place % rows.block_size
                source.append(torch.arange(there, there + count))
                position.append(place)
                places.append(index)
                cache_slot.append(torch.where(place < rows.start[r], -1, kv_slot))
                token.append(rows.text[rows.req_idx[r], place + 1].long())
                there += count
            source.append(rows.source[here])
            position.append(rows.position[here])
            places.append(rows.index[here])
            cache_slot.append(rows.kv_slot[here])
            token.append(rows.token[here])
        added = np.cumsum(counts)
        start = np.array(rows.row_start_host) + np.concatenate(([0], added))
        return replace(
            rows,
            states=tuple(
                torch.cat([state, *(piece.states[layer][piece.rows] for piece in kept)])
                for layer, state in enumerate(rows.states)
            ),
            source=torch.cat(source),
            token=torch.cat(token),
            position=torch.cat(position),
            index=torch.cat(places),
            kv_slot=torch.cat(cache_slot),
            row_start=torch.from_numpy(start).to(rows.row_start.dtype),
            row_start_host=start.tolist(),  # a host array
            last=rows.last + torch.from_numpy(added),
        )


def _row_bytes(states: Sequence[Tensor]) -> int:
    return _ROW + sum(state[0].nbytes for state in states)
