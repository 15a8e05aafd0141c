"""Compaction of accepted paths in the target's paged caches."""

from __future__ import annotations

import torch

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

    A parent's index is below its child's, so path[j] ≥ j: each node moves down or stays. Its new
    row holds itself, a rejected node, or a node that also moves down. Reading all rows before
    writing any is therefore enough.

    Args:
        slot_mapping: [≥ num_rows] int64, slot of each batch row; negative: none.
        num_rows: rows of the batch; a path's unused positions are clamped to the last one.
    """
    position = torch.arange(1, rows.path.shape[1], device=rows.path.device)
    root = (rows.query_start + rows.base - 1)[:, None]
    source, target = root + rows.path[:, 1:], root + position
    moves = (position <= rows.accepted[:, None]) & (source != target)
    source, target = (slot_mapping[row.clamp(max=num_rows - 1)] for row in (source, target))
    move_kv(kv_caches, source, target, moves)
