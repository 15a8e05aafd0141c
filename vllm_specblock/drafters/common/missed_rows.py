"""Committed rows that paused drafters have missed: kept to catch up, or masked in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.triton_kernels.kv_cache.mask_holes import RowsToWrite, mask_holes

MOST_BYTES = 256 << 20
"""Bytes of hidden states to keep: 75,000 tokens of three 16-bit layers at Ht = 576."""

_ROW = 64  # bytes of a row besides its states


class MissedRows(NamedTuple):
    """The committed rows of a step with R requests, on the host."""

    req_idx: np.ndarray  # R request slots
    states: tuple[Tensor, ...]  # L × [n, Ht]
    source: Tensor | None  # [T] int64, row of `states` of each committed row; None: the same
    begin: np.ndarray  # R, a request's first row among those T
    length: np.ndarray  # R, how many they are
    position: np.ndarray  # R, of the first

    @classmethod
    def of(cls, rows: CommittedTokens) -> MissedRows:
        """Convert from the struct that drafters read."""
        numbers = rows.req_idx, rows.last, rows.position
        req_idx, last, position = (x.numpy() for x in numbers)  # a host tensor each
        begin = np.array(rows.row_start_host[:-1])
        states = tuple(rows.states)
        return cls(req_idx, states, rows.source, begin, last + 1 - begin, position[begin])


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


class CacheHoles:
    """Cache blocks that drafters have not written in full, and block tables without them.

    A later request may reuse such a block. Keys carry their RoPE positions, so a table without the
    block masks it exactly. The host reads `any` alone.

    Args:
        num_blocks: cache blocks of the engine.
        masks: [2, requests] int64, by batch row; blind: [S] bool, by request slot; see `mask`.
    """

    def __init__(self, num_blocks: int, block_size: int, masks: Tensor, blind: Tensor) -> None:
        self.block_size, self.masks, self.blind = block_size, masks, blind
        # The last entry is for rows without a slot.
        self.missing = torch.full((num_blocks + 1,), block_size, device=masks.device)
        self.skips = 0
        # 2 · `skips` at the time of the last mask, plus 1 if any block was incomplete.
        self.seen = torch.zeros(1, dtype=torch.int64, pin_memory=masks.is_cuda)

    @property
    def any(self) -> bool:
        """Whether a block may be incomplete, as far as the host knows; not for a graph."""
        if self.masks.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.skips > 0 and int(self.seen) != 2 * self.skips  # a host tensor

    def skip(self, kv_slot: Tensor) -> None:
        """Drafters do not write the rows in `kv_slot` [T] int64; −1: no row."""
        block = (kv_slot // self.block_size).remainder(len(self.missing))  # rounds down: −1 is last
        self.missing.scatter_reduce_(0, block, kv_slot % self.block_size, "amin")
        self.skips += 1

    def mask(self, table: Tensor, first: Tensor, last: Tensor, req_idx: Tensor) -> bool:
        """Remove incomplete blocks from the tables of requests whose next rows will be written.

        Writes `masks` of each request: the tokens in removed blocks, and the first position to
        store, behind incomplete blocks; and whether it is `blind`, which means that it cannot
        draft: all its rows lie in an incomplete block, which stays in the table.

        Args:
            table: [R, blocks] int32, changed in place.
            first, last: [R] int64, positions of the first and the last row that will be written.
            req_idx: [R] int64.

        Returns:
            whether a request may have an incomplete block; always on a GPU.
        """
        self.masks.zero_()
        found = table.is_cuda or bool((self.missing[table.long()] < self.block_size).any())
        if found:
            rows = RowsToWrite(self.missing, table, first, last, *self.masks[:, : len(table)])
            self.blind[req_idx] = mask_holes(rows, self.block_size)
        incomplete = (self.missing[:-1] < self.block_size).any() + 2 * self.skips
        self.seen.copy_(incomplete, non_blocking=True)
        return found

    def masked(self, rows: CommittedTokens) -> CommittedTokens:
        """Return rows whose tables were not masked with masked ones."""
        table, first = rows.block_table.clone(), rows.position[rows.row_start[:-1].long()]
        if not self.mask(table, first, rows.position[rows.last], rows.req_idx):
            return rows
        hidden, start = self.masks[:, : len(table)]
        request = rows.request()
        index = rows.position - hidden[request]
        kv_slot = rows.kv_slot.masked_fill(rows.position < start[request], -1)
        return replace(rows, index=index, kv_slot=kv_slot, block_table=table)
