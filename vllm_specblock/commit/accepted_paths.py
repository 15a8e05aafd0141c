"""Accepted paths of a step's requests, gathered from the tree states."""

from __future__ import annotations

import torch


def read_accepted(
    req_idx: torch.Tensor,
    live: torch.Tensor,
    row_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the accepted paths of a step's requests.

    Args:
        req_idx: [R] integers, of each request.
        live: [R] bool, or 0 and 1; the others count as no drafts.
        row_start: [R+1] int32, first row of each request in the batch.
        base: [R] int64, its rows up to and including the root.
        path: [S, D+1] int64, accepted: [S] int32, as `TreeStates` has them.

    Returns:
        path: [R, D+1] int64.
        accepted: [R] int32.
        query_start: [R] int32, first row of each request.
        drafts: [R] int64, nodes that the target ran on. On the host there is only how many were
            scheduled.
    """
    start, end = row_start[:-1], row_start[1:]
    return path[req_idx], accepted[req_idx], start, (end - start - base) * live
