"""Where the rows of a drafter's block 1 lie and what they see, for CPUs; see `first_sight.py`."""

from __future__ import annotations

import torch

from ..optional_numba import njit
from .first_sight import FirstSight


def first_sight_numba(
    position: torch.Tensor,
    slot: torch.Tensor,
    row_start: torch.Tensor,
    last: torch.Tensor,
    block_size: int,
    num_words: int,
) -> FirstSight:
    """Arguments as `first_sight_triton` has them."""
    sight = FirstSight.room(len(position), len(last), block_size, num_words, position.device)
    sight.words.zero_()
    _first_sight(
        *(x.contiguous().numpy() for x in (position, slot, row_start, last)), block_size,
        sight.entry.numpy(), sight.query_start.numpy(), sight.prefix_len.numpy(),
        sight.ends.numpy(), sight.kept_start.numpy(), sight.kept_prefix.numpy(),
        sight.base.numpy(),
    )  # fmt: skip
    return sight


@njit
def _first_sight(
    position, slot,  # [T] int64
    row_start,  # [R+1] int32
    last,  # [R] int64
    K,
    entry, query_start, prefix_len, ends, kept_start, kept_prefix, base,  # FirstSight
):  # fmt: skip
    for row in range(len(position)):
        base[row] = position[row] + 1
        for k in range(K):
            entry[row, k] = (slot[row] * K if slot[row] >= 0 else -K) + k
            prefix_len[row * K + k] = position[row] * K + k + 1
    for request in range(len(last)):
        newest = position[last[request]]
        ends[request] = (newest + 1) * K
        for k in range(K):
            kept_prefix[request * K + k] = newest * K + k + 1
    for request in range(len(row_start)):
        query_start[request] = row_start[request] * K
        kept_start[request] = request * K
