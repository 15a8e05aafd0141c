"""Compaction of accepted paths in the target's paged caches."""

from __future__ import annotations

import torch

from vllm_specblock.commit.committed_tokens import committed_sources
from vllm_specblock.triton_kernels.kv_cache.commit import (
    AcceptedRows,
    KVCacheSet,
    move_kv,
    move_path_triton,
)
from vllm_specblock.triton_kernels.op import op


@op(move_path_triton)
def move_path(
    kv_caches: KVCacheSet, slot_mapping: torch.Tensor, rows: AcceptedRows, num_rows: int
) -> None:
    """Move the keys and values of accepted nodes behind the root's, in every layer.

    Args:
        slot_mapping: [≥ num_rows] int64, slot of each batch row; negative: none.
        num_rows: rows of the batch; a path's unused positions are clamped to the last one.
    """
    source, target, moves = committed_sources(rows)
    source, target = (slot_mapping[row.clamp(max=num_rows - 1)] for row in (source, target))
    move_kv(kv_caches, source, target, moves)
