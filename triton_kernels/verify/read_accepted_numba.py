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
    """Arguments and results as `commit.accepted_paths.read_accepted` has them."""
    count = len(req_idx)
    given = (x.contiguous().numpy() for x in (req_idx, live, row_start, base))
    found = torch.empty(count, path.shape[1], dtype=torch.int64)
    lengths = torch.empty(count, dtype=torch.int32)
    query_start, drafts = torch.empty(2, count, dtype=torch.int64)
    made = (x.numpy() for x in (found, lengths, query_start, drafts))
    _read_accepted(*given, path.numpy(), accepted.numpy(), *made)
    return found, lengths, query_start, drafts


@njit
def _read_accepted(
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
        new_path[request], new_accepted[request] = path[at], accepted[at]
        query_start[request] = start
        run = row_start[request + 1] - start - base[request]
        drafts[request] = run if live[request] else 0
