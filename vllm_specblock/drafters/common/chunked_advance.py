"""Chunked advance: long prompts in bounded memory.

Thousands of prompt rows of K positions, in an MLP's several copies, would take gigabytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from vllm_specblock.drafters.interface import CommittedTokens

MAX_ROWS = 512
"""Rows of one part. With K = 4 positions that is enough for matrix units to be busy."""


def chunked_advance(
    rows: CommittedTokens, forward: Callable[[CommittedTokens], torch.Tensor]
) -> torch.Tensor:
    """Call `forward` on one part after the other; earlier ones are in the cache by then.

    It takes a part with n requests, and returns [n, ...] of the last row that it has of each.
    """
    if rows.row_start_host[-1] <= MAX_ROWS:
        return forward(rows)
    found = []
    for start, end in pairwise(chunk_bounds(rows.row_start_host, MAX_ROWS)):
        part, unfinished = chunk_of(rows, start, end)
        out = forward(part)
        found.append(out[: len(out) - unfinished])
    return torch.cat(found)


def chunk_bounds(row_start: list[int], most: int) -> list[int]:
    """Return where parts begin and end: between requests, or within one that is too long.

    Requests with padding have at most 256 rows, so padding is never a part of its own.
    """
    found = [0]
    for start, end in pairwise(row_start):
        if end - found[-1] > most and start > found[-1]:
            found.append(start)
        while end - found[-1] > most:
            found.append(found[-1] + most)
    return [*found, row_start[-1]]


def chunk_of(rows: CommittedTokens, start: int, end: int) -> tuple[CommittedTokens, bool]:
    """Rows `start` … `end` − 1, and whether the last of their requests goes on after them."""
    bounds = rows.row_start_host
    first, after = bisect_right(bounds, start) - 1, bisect_left(bounds, end)
    host = [min(max(each, start), end) - start for each in bounds[first : after + 1]]
    part = replace(
        rows,
        **{name: getattr(rows, name)[start:end] for name in rows.PER_ROW},
        **{name: getattr(rows, name)[first:after] for name in rows.PER_REQUEST},
        row_start=rows.row_start[first : after + 1].clamp(start, end) - start,
        row_start_host=host,
        last=rows.last[first:after].clamp(max=end - 1) - start,
    )
    return part, bounds[after] > end
