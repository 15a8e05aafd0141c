"""Accepted paths of the last step by request, for CPUs; see `read_accepted.py`."""

from __future__ import annotations

import torch

from ..optional_numba import njit


def read_accepted_numba(
    req_idx: torch.Tensor,
    live: torch.Tensor,
    row_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and results as `commit.result.read_accepted` has them."""
    count = len(req_idx)
    numbers = torch.empty(2, count, dtype=torch.int64)
    found = path.new_empty(count, path.shape[1]), accepted.new_empty(count), *numbers
    given = (req_idx, live, row_start, base, path, accepted)
    _read(*(x.numpy() for x in given), *(x.numpy() for x in found))
    return found


@njit
def _read(
    req_idx,  # [R] integers
    live,  # [R] integers or bool
    row_start,  # [R + 1] int32
    base,  # [R] int64
    path,  # [S, D + 1] int64
    accepted,  # [S] int32
    new_path,  # [R, D + 1] int64
    new_accepted,  # [R] int32
    query_start,  # [R] int64
    drafts,  # [R] int64
):
    for request in range(len(req_idx)):
        at, start = req_idx[request], row_start[request]
        new_path[request] = path[at]
        new_accepted[request] = accepted[at]
        query_start[request] = start
        run = row_start[request + 1] - start - base[request]
        drafts[request] = run if live[request] != 0 else 0
