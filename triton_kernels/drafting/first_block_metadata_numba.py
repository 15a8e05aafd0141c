"""Attention metadata of a drafter's first block, for CPUs; see `first_block_metadata.py`."""

from __future__ import annotations

import torch

from ..optional_numba import njit
from .first_block_metadata import FirstBlockMetadata


def first_block_metadata_numba(
    position: torch.Tensor,
    kv_slot: torch.Tensor,
    row_start: torch.Tensor,
    last: torch.Tensor,
    block_size: int,
    num_words: int,
) -> FirstBlockMetadata:
    """Arguments as `first_block_metadata_triton` has them."""
    metadata = FirstBlockMetadata.room(
        len(position), len(last), block_size, num_words, position.device
    )
    metadata.mask_words.zero_()
    _first_block_metadata(
        *(x.contiguous().numpy() for x in (position, kv_slot, row_start, last)),
        block_size,
        metadata.kv_index.numpy(),
        metadata.query_start.numpy(),
        metadata.prefix_len.numpy(),
        metadata.ends.numpy(),
        metadata.kept_start.numpy(),
        metadata.kept_prefix.numpy(),
        metadata.base.numpy(),
    )
    return metadata


@njit
def _first_block_metadata(
    position,  # [T] int64
    kv_slot,  # [T] int64
    row_start,  # [R+1] int32
    last,  # [R] int64
    K,
    kv_index,  # of FirstBlockMetadata, as all below
    query_start,
    prefix_len,
    ends,
    kept_start,
    kept_prefix,
    base,
):
    for row in range(len(position)):
        base[row] = position[row] + 1
        for k in range(K):
            kv_index[row, k] = (kv_slot[row] * K if kv_slot[row] >= 0 else -K) + k
            prefix_len[row * K + k] = position[row] * K + k + 1
    for request in range(len(last)):
        newest = position[last[request]]
        ends[request] = (newest + 1) * K
        for k in range(K):
            kept_prefix[request * K + k] = newest * K + k + 1
    for request in range(len(row_start)):
        query_start[request] = row_start[request] * K
        kept_start[request] = request * K
