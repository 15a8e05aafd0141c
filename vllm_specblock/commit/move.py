"""Bringing an accepted path together in the target's paged caches."""

from __future__ import annotations

import torch

from vllm_specblock.commit.committed_tokens import committed_sources
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet, move_kv, move_path_triton
from vllm_specblock.triton_kernels.kv_cache.commit_numba import move_path_numba
from vllm_specblock.triton_kernels.optional_numba import takes


def move_path(
    kv_caches: KVCacheSet,
    slot_mapping: torch.Tensor,
    query_start: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    num_rows: int,
) -> None:
    """Move the keys and values of accepted nodes right behind the root's, in every layer.

    CUDA tensors go to the kernel.

    Args:
        slot_mapping: [≥ num_rows] int64, where each row of the batch lies; negative: nowhere.
        query_start, base, path, accepted: as in `committed_sources`.
        num_rows: rows of the batch. A path's unused positions would lead beyond it: they stay on
            its last row.
    """
    known = kv_caches.packing is not None or kv_caches.caches[0].stride(-1) == 1
    if path.is_cuda or (known and takes(path)):
        op = move_path_triton if path.is_cuda else move_path_numba
        return op(kv_caches, slot_mapping, query_start, base, path, accepted, num_rows)
    source, target, moves = committed_sources(query_start, base, path, accepted)
    source, target = (slot_mapping[row.clamp(max=num_rows - 1)] for row in (source, target))
    move_kv(kv_caches, source, target, moves)
