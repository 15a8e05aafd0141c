"""Commit of accepted paths: rows for drafters, moved KV entries, new KV entries."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from vllm_specblock.triton_kernels.kv_cache.commit import (
    AcceptedRows,
    KVCacheSet,
    move_kv,
    move_path_triton,
)
from vllm_specblock.triton_kernels.kv_cache.committed_tokens import (
    CommittedRows,
    StepRows,
    committed_tokens_triton,
)
from vllm_specblock.triton_kernels.op import op

if TYPE_CHECKING:  # it needs numba
    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@op(committed_tokens_triton)
def committed_tokens(step: StepRows, num_rows: int) -> CommittedRows:
    """Return a step's committed rows for the drafters; `num_rows`: rows of the batch."""
    request, base, local = step.request, step.base, step.local
    start = step.query_start[request]
    beyond = local - base[request] + 1  # position on the path, ≤ 0 up to the root
    on_path = step.path[request, beyond.clamp(min=0)]
    source = start + torch.where(beyond > 0, base[request] - 1 + on_path, local)
    # Entries beyond the accepted path, and without a verified node, are stale.
    source = source.clamp(max=num_rows - 1)
    real = beyond <= step.accepted[request]
    place = (start + local).clamp(max=num_rows - 1)
    position = step.positions[step.query_start][request] + local
    ahead = (position + 1).clamp(max=step.text.shape[1] - 1)
    token = torch.where(real, step.text[step.req_idx[request], ahead].long(), 0)
    stored = real & (position >= step.first[request])
    kv_slot = torch.where(stored, step.slot_mapping[place], -1)
    index = position - step.hidden[request]
    last = step.row_start[:-1] + base - 1 + step.accepted
    temperature = step.temperature[step.req_idx]
    return CommittedRows(source, token, position, index, kv_slot, last, temperature)


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


def store_kv_vllm(
    kv_cache: torch.Tensor,
    kv_index: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    packing: Packing | None = None,
) -> None:
    """Launch vLLM's own kernel; arguments as in `store_kv`."""
    if not len(kv_index):
        return
    dtype, scales = "auto", (_one(kv_cache.device),) * 2  # not read
    if key_scale is not None and value_scale is not None:
        kv_cache, dtype, scales = kv_cache.view(torch.uint8), "fp8", (key_scale, value_scale)
    else:
        key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
    halves = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, *halves, kv_index.contiguous(), dtype, *scales
    )


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


@op(store_kv_vllm)
def store_kv(
    kv_cache: torch.Tensor,
    kv_index: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    packing: Packing | None = None,
) -> None:
    """Store keys and values at their entries.

    Args:
        kv_cache: [blocks, kv heads, block size, 2D], a view whose entries are consecutive in
            memory from block to block (key first, then value).
        kv_index: [T] int64, block · block size + offset; negative: padding. The torch form writes
            padding to entry 0, in vLLM's null block, which is never read; the kernel skips it.
        key, value: [T, kv heads, D]; rows are contiguous.
        key_scale, value_scale: [] fp32 each, factors of the stored numbers; only for a
            float8_e4m3fn cache, where out-of-range numbers saturate.
        packing: how the cache is packed, on a CPU; padding is then skipped.
    """
    if packing is not None:
        from vllm_specblock.triton_kernels.attention.cpu_packing import store_packed

        return store_packed(kv_cache, packing, kv_index, key, value)
    _, heads, _, width = kv_cache.shape
    if kv_cache.dtype == FP8:
        assert key_scale is not None and value_scale is not None
        # As bytes, since torch does not index fp8.
        kv_cache = kv_cache.view(torch.uint8)
        key, value = _to_fp8(key, key_scale), _to_fp8(value, value_scale)
    flat = kv_cache.transpose(1, 2).view(-1, heads, width)
    flat[kv_index.clamp(min=0)] = torch.cat([key, value], dim=-1)


def _to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the bytes of x / scale, saturated: torch's own conversion overflows to NaN."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
