"""Where an accepted path lies in the batch, and where it belongs."""

from __future__ import annotations

import torch


def committed_sources(
    query_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch rows of the accepted nodes, before and after they are brought together.

    A request's rows are its `base` rows up to and including the root, then its nodes in tree
    order. Position j of the path belongs right behind position j − 1.

    A parent's index is below its child's, so path[j] ≥ j: every node moves down or stays, and
    the row it moves to holds either itself, a rejected node, or a node that moves down too.
    Reading all rows before writing any is therefore enough.

    Args:
        query_start: [R] int64, first batch row of each request.
        base: [R] int64.
        path: [R, D+1] int64, column 0 is the root.
        accepted: [R] int32.

    Returns:
        source, target: [R, D] int64, batch rows of position 1 … D.
        moves: [R, D] bool, False for what is in place already and beyond the path.
    """
    position = torch.arange(1, path.shape[1], device=path.device)
    root = (query_start + base - 1)[:, None]
    source, target = root + path[:, 1:], root + position
    return source, target, (position <= accepted[:, None]) & (source != target)
