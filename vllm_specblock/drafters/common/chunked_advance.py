"""Chunked advance: long prompts in bounded memory.

A batch may bring thousands of prompt rows, of K positions each, and a drafter's MLP holds all of
them in several copies: gigabytes at the size of an 8B target, for drafts that read one row per
request.
"""

from __future__ import annotations

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

    Args:
        rows: all of the step, T rows of R requests.
        forward: a part with n requests → [n, ...], of the last row that it has of each.

    Returns:
        [R, ...], of the last row of each request.
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
    """Where parts begin and end: between requests, or within one that is too long.

    Behind the newest row of a request with drafts there may be padding, which must not be a part
    of its own: such requests have at most 256 rows and are never cut. Prompts have no padding.
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
    bounds = list(pairwise(rows.row_start_host))
    first = next(index for index, (_, after) in enumerate(bounds) if after > start)
    after = next(index for index, (_, last) in enumerate(bounds, 1) if last >= end)
    here, of = slice(start, end), slice(first, after)
    host = [min(max(each, start), end) - start for each in rows.row_start_host[first : after + 1]]
    part = replace(
        rows,
        source=rows.source[here],
        token=rows.token[here],
        position=rows.position[here],
        index=rows.index[here],
        kv_slot=rows.kv_slot[here],
        row_start=rows.row_start[first : after + 1].clamp(start, end) - start,
        row_start_host=host,
        last=rows.last[of].clamp(max=end - 1) - start,
        start=rows.start[of],
        block_table=rows.block_table[of],
        req_idx=rows.req_idx[of],
        temperature=rows.temperature[of],
    )
    return part, bounds[after - 1][1] > end
