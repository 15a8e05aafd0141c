"""What the objective has to know of other ranks: nothing but how many rows they counted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def mean_over_ranks(total: Tensor, count: Tensor, floor: float = 0.0) -> Tensor:
    """This rank's share of means over all ranks' rows, to be averaged over the ranks.

    With it, n ranks compute the gradient that one rank would for all of their rows, though
    each counts another number of rows.

    Args:
        total: [...] fp32 with gradient, sums over this rank's rows.
        count: [...] this rank's rows, in any dtype.
        floor: every divisor is at least this share of the largest of them.

    Returns:
        [...] fp32; 0 where nobody counted a row.
    """
    ranks = world()[1]
    count = count.to(torch.float32, copy=True)
    if ranks > 1:
        dist.all_reduce(count)
    return total * ranks / count.clamp(min=1).maximum(floor * count.max())
