"""Committed tokens that paused drafters have missed, kept so that they can catch up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_specblock.drafters.interface import CommittedTokens

MOST_BYTES = 256 << 20
"""Bytes of hidden states to keep: 75,000 tokens of three 16-bit layers at Ht = 576."""

_ROW = 64  # bytes of a row besides its states


class MissedRows(NamedTuple):
    """The committed rows of a step with R requests, on the host."""

    req_idx: list[int]  # R request slots
    states: tuple[Tensor, ...]  # L × [n, Ht]
    source: Tensor | None  # [T] int64, row of `states` of each committed row; None: the same
    begin: list[int]  # R, a request's first row among those T
    length: list[int]  # R, how many they are
    position: list[int]  # R, of the first

    @classmethod
    def of(cls, rows: CommittedTokens) -> MissedRows:
        """Convert from the struct that drafters read."""
        begin = rows.row_start_host[:-1]
        return cls(
            rows.req_idx.tolist(),  # a host tensor
            tuple(rows.states),
            rows.source,
            begin,
            [last + 1 - first for first, last in zip(begin, rows.last.tolist())],  # a host tensor
            rows.position[begin].tolist(),  # a host tensor
        )


class _Piece(NamedTuple):
    """`rows` of L × [n, Ht] states: one request's in one step, from `position` on."""

    states: tuple[Tensor, ...]
    rows: slice
    position: int

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.position + len(self)


class Backlog:
    """Committed rows that no drafter has advanced on, by request slot; on a CPU.

    Args:
        most_bytes: of states; a step beyond that is not kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.pieces: dict[int, list[_Piece]] = {}
        self._rows: Counter[int] = Counter()

    def forget(self, req_idx: int) -> None:
        """Drop the rows of a request."""
        self._rows.pop(req_idx, None)
        for piece in self.pieces.pop(req_idx, []):
            self.bytes -= len(piece) * _row_bytes(piece.states)

    def rows(self, req_idx: int) -> int:
        """Return how many rows of a request are kept."""
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
            [R] bool, requests whose rows were kept; the others have lost their earlier rows, too.
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
            before = self.pieces.get(req_idx)
            if before and before[-1].end != piece.position:
                self.forget(req_idx)  # dummy batches share a slot
            self.pieces.setdefault(req_idx, []).append(piece)
            self._rows[req_idx] += len(piece)
            first = end
        return kept

    def catch_up(self, rows: CommittedTokens) -> CommittedTokens:
        """Return a step's rows behind the kept rows of their requests, which are dropped here."""
        if not self.pieces:
            return rows
        slots = rows.req_idx.tolist()  # a host tensor
        first = rows.position[rows.row_start_host[:-1]].tolist()  # a host tensor
        behind = []
        for req_idx, position in zip(slots, first):
            pieces = self.pieces.get(req_idx, [])
            complete = not pieces or pieces[-1].end == position  # else rows in between are missing
            behind.append(pieces if complete else [])
            self.forget(req_idx)
        if not any(behind):
            return rows
        # Kept states go behind the batch's own.
        there = len(rows.states[0]) if rows.states else 0
        counts = [sum(map(len, pieces)) for pieces in behind]
        parts: list[dict[str, Tensor]] = []
        for r, (pieces, count) in enumerate(zip(behind, counts)):
            here = slice(rows.row_start_host[r], rows.row_start_host[r + 1])
            if pieces:
                parts.append(_rows_behind(rows, r, pieces[0].position, count, there))
                there += count
            parts.append({name: getattr(rows, name)[here] for name in rows.PER_ROW})
        fields: dict[str, Any] = {
            name: torch.cat([part[name] for part in parts]) for name in rows.PER_ROW
        }
        added = np.cumsum(counts)
        start = np.array(rows.row_start_host) + np.concatenate(([0], added))
        kept = [piece for pieces in behind for piece in pieces]
        return replace(
            rows,
            states=tuple(
                torch.cat([state, *(piece.states[layer][piece.rows] for piece in kept)])
                for layer, state in enumerate(rows.states)
            ),
            **fields,
            row_start=torch.from_numpy(start).to(rows.row_start.dtype),
            row_start_host=start.tolist(),  # a host array
            last=rows.last + torch.from_numpy(added),
        )


def _rows_behind(
    rows: CommittedTokens, r: int, first: int, count: int, source: int
) -> dict[str, Tensor]:
    """Fields of request r's rows from position `first` on, whose states are from `source` on."""
    position = torch.arange(first, first + count)
    newest = rows.row_start_host[r]
    index = position - (rows.position[newest] - rows.index[newest])
    block = rows.block_table[r, index.clamp(min=0) // rows.block_size].long()
    kv_slot = block * rows.block_size + position % rows.block_size
    return {
        "source": torch.arange(source, source + count),
        "token": rows.text[rows.req_idx[r], position + 1].long(),
        "position": position,
        "index": index,
        "kv_slot": torch.where(position < rows.start[r], -1, kv_slot),
    }


def _row_bytes(states: Sequence[Tensor]) -> int:
    return _ROW + sum(state[0].nbytes for state in states)
