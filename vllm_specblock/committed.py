"""CommittedTokens: the rows of one target step that drafters read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch

MAX_ROWS = 512
"""Rows of one part. With K = 4 positions that is enough for matrix units to be busy."""


@dataclass(frozen=True)
class CommittedTokens:
    """The rows that one target step committed, on which drafters advance.

    Row t holds the target's states of the token at `position[t]`, and the token after it. A
    request's rows are consecutive, perhaps with padding after the accepted path (`kv_slot` −1).
    T rows, R requests, L layers of the target that some drafter reads, B rows of its batch.
    """

    # L × [B, Ht], low layers first; in CUDA graphs one tensor.
    states: Sequence[torch.Tensor] | torch.Tensor
    source: torch.Tensor  # [T] int64, row of `states`
    token: torch.Tensor  # [T] int64, the token at position + 1, target vocabulary
    position: torch.Tensor  # [T] int64
    index: torch.Tensor  # [T] int64, place in `block_table`: less the tokens of masked blocks
    kv_slot: torch.Tensor  # [T] int64, the target's cache slot; −1: not stored (padding, holes)
    row_start: torch.Tensor  # [R+1] int32, first row of each request
    row_start_host: list[int]
    last: torch.Tensor  # [R] int64, the newest row of each request, from which it drafts
    block_table: torch.Tensor  # [R, max blocks] int32, without masked blocks (`CacheHoles`)
    block_size: int  # tokens in one block
    max_position: int  # host upper bound of `position`, for loop bounds only
    # [S, longest request] int32, tokens of the engine's S request slots, up to the root's, which
    # is at position[last] + 1.
    text: torch.Tensor
    req_idx: torch.Tensor  # [R] int64, each request's row of `text`
    temperature: torch.Tensor  # [R] fp32; 0: greedy

    PER_ROW: ClassVar = ("source", "token", "position", "index", "kv_slot")
    PER_REQUEST: ClassVar = ("block_table", "req_idx", "temperature")

    def request(self) -> torch.Tensor:
        """[T] int64, the request of each row."""
        row = torch.arange(len(self.token), device=self.token.device)
        return (row[:, None] >= self.row_start[1:-1]).sum(1)

    def features(self, layers: tuple[int, ...]) -> torch.Tensor:
        """[T, len(layers) · Ht], the states of `layers` (indices into `states`) side by side."""
        first, after = layers[0], layers[-1] + 1
        if isinstance(self.states, torch.Tensor) and layers == (*range(first, after),):
            rows = self.states[first:after].transpose(0, 1)
            return rows.index_select(0, self.source).flatten(1)  # one launch
        return torch.cat([self.states[layer][self.source] for layer in layers], dim=-1)


class MissedRows(NamedTuple):
    """The committed rows of a step with R requests, on the host."""

    req_idx: np.ndarray  # R request slots
    states: tuple[torch.Tensor, ...]  # L × [n, Ht]
    source: torch.Tensor | None  # [T] int64, row of `states` of each committed row; None: the same
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


def in_parts(
    rows: CommittedTokens, forward: Callable[[CommittedTokens], torch.Tensor]
) -> torch.Tensor:
    """Call `forward` on one part after the other; earlier ones are in the cache by then.

    Thousands of prompt rows of K positions, in an MLP's several copies, would take gigabytes.

    Args:
        forward: takes a part with n requests, returns [n, ...] of the last row of each.
    """
    bounds = rows.row_start_host
    if bounds[-1] <= MAX_ROWS:
        return forward(rows)
    # Between requests, or within one that is too long. Requests with padding have at most 256
    # rows, so padding is never a part of its own.
    cuts = [0]
    for start, end in pairwise(bounds):
        if end - cuts[-1] > MAX_ROWS and start > cuts[-1]:
            cuts.append(start)
        while end - cuts[-1] > MAX_ROWS:
            cuts.append(cuts[-1] + MAX_ROWS)
    found = []
    for start, end in pairwise([*cuts, bounds[-1]]):
        out = forward(part_of(rows, start, end))
        unfinished = bounds[bisect_left(bounds, end)] > end  # the last request goes on
        found.append(out[: len(out) - unfinished])
    return torch.cat(found)


def part_of(rows: CommittedTokens, start: int, end: int) -> CommittedTokens:
    """Rows `start` … `end` − 1."""
    bounds = rows.row_start_host
    first, after = bisect_right(bounds, start) - 1, bisect_left(bounds, end)
    return replace(
        rows,
        **{name: getattr(rows, name)[start:end] for name in rows.PER_ROW},
        **{name: getattr(rows, name)[first:after] for name in rows.PER_REQUEST},
        row_start=rows.row_start[first : after + 1].clamp(start, end) - start,
        row_start_host=[min(max(n, start), end) - start for n in bounds[first : after + 1]],
        last=rows.last[first:after].clamp(max=end - 1) - start,
    )
