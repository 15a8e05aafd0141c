"""Committed rows that paused drafters have missed, kept to catch up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_specblock.committed import CommittedTokens, MissedRows

MOST_BYTES = 256 << 20
"""Bytes of hidden states to keep: 75,000 tokens of three 16-bit layers at Ht = 576."""

_ROW = 64  # bytes of a row besides its states


class _Piece(NamedTuple):
    """One request's rows of one step, at positions `begin` … `end` − 1."""

    states: list[Tensor]  # L × [n, Ht]
    begin: int
    end: int


class Backlog:
    """Committed rows that no drafter has advanced on, by request slot; on a CPU."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.pieces: dict[int, list[_Piece]] = {}  # without gaps

    def forget(self, req_idx: int) -> None:
        """Drop the rows of a request."""
        for piece in self.pieces.pop(req_idx, []):
            self.bytes -= (piece.end - piece.begin) * _row_bytes(piece.states)

    def rows(self, req_idx: int) -> int:
        """Return how many rows of a request are kept."""
        pieces = self.pieces.get(req_idx)
        return pieces[-1].end - pieces[0].begin if pieces else 0

    def has_room(self, rows: int, states: Sequence[Tensor]) -> bool:
        """Whether there is memory for `rows` more rows of `states`."""
        return self.bytes + rows * _row_bytes(states) <= self.most_bytes

    def keep(self, rows: MissedRows, wanted: np.ndarray | bool = True) -> None:
        """Keep a step's rows of the requests `wanted` [R] bool, as long as there is memory.

        The others lose their earlier rows, too.
        """
        # Only what is kept is gathered: a piece holds its whole step's states.
        size, kept = _row_bytes(rows.states), np.full(len(rows.req_idx), wanted)
        chosen: list[int] = []
        numbers = rows.req_idx, rows.begin, rows.length, rows.position
        requests = [*zip(*(x.tolist() for x in numbers))]  # host arrays
        for r, (req_idx, begin, count, _) in enumerate(requests):
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
        for req_idx, _, count, begin in compress(requests, kept):
            before = self.pieces.get(req_idx)
            if before and before[-1].end != begin:
                self.forget(req_idx)  # dummy batches share a slot
            own = [state[first : first + count] for state in states]
            self.pieces.setdefault(req_idx, []).append(_Piece(own, begin, begin + count))
            first += count

    def catch_up(self, rows: CommittedTokens) -> CommittedTokens:
        """Return a step's rows behind the kept rows of their requests, which are dropped here.

        No block of the step's tables is masked.
        """
        if not self.pieces:
            return rows
        slots = rows.req_idx.tolist()  # a host tensor
        first = rows.position[rows.row_start_host[:-1]].tolist()  # a host tensor
        counts = np.zeros(len(slots), dtype=np.int64)
        kept: list[_Piece] = []
        for r, (req_idx, position) in enumerate(zip(slots, first)):
            pieces = self.pieces.get(req_idx)
            if pieces and pieces[-1].end == position:  # else rows in between are missing
                counts[r] = self.rows(req_idx)
                kept += pieces
            self.forget(req_idx)
        if not kept:
            return rows
        request = torch.from_numpy(np.arange(len(slots)).repeat(counts))
        position = torch.cat([torch.arange(piece.begin, piece.end) for piece in kept])
        block = rows.block_table[request, position // rows.block_size].long()
        there = len(rows.states[0]) if rows.states else 0  # kept states go behind the batch's own
        missed = {
            "source": torch.arange(there, there + len(position)),
            "token": rows.text[rows.req_idx[request], position + 1].long(),
            "position": position,
            "index": position,
            "kv_slot": block * rows.block_size + position % rows.block_size,
        }
        order = torch.cat([request, rows.request()]).argsort(stable=True)
        fields: dict[str, Any] = {
            name: torch.cat([missed[name], getattr(rows, name)])[order] for name in missed
        }
        start = np.array(rows.row_start_host)
        start[1:] += counts.cumsum()
        return replace(
            rows,
            states=tuple(
                torch.cat([state, *(piece.states[layer] for piece in kept)])
                for layer, state in enumerate(rows.states)
            ),
            **fields,
            row_start=torch.from_numpy(start).to(rows.row_start.dtype),
            row_start_host=start.tolist(),  # a host array
            last=rows.last + torch.from_numpy(counts.cumsum()),
        )


def _row_bytes(states: Sequence[Tensor]) -> int:
    return _ROW + sum(state[0].nbytes for state in states)
