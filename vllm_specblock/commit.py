"""Commit of accepted paths: rows for drafters, moved KV entries, new KV entries."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
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
from vllm_specblock.triton_kernels.op import op, views

if TYPE_CHECKING:  # it needs numba
    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@op(committed_tokens_triton)
def committed_tokens(step: StepRows, num_rows: int) -> CommittedRows:
    """Return a step's committed rows for the drafters; `num_rows`: rows of the batch."""
    of = views(step)
    request, begin = of.request, of.query_start[of.request]
    root = of.base[request] - 1
    beyond = of.local - root  # position on the path, ≤ 0 up to the root
    on_path = of.path[request, np.maximum(beyond, 0)]
    source = begin + np.where(beyond > 0, root + on_path, of.local)
    # Entries beyond the accepted path, and without a verified node, are stale.
    source = np.minimum(source, num_rows - 1)
    real = beyond <= of.accepted[request]
    position = of.positions[of.query_start][request] + of.local
    ahead = np.minimum(position + 1, of.text.shape[1] - 1)
    token = np.where(real, of.text[of.req_idx[request], ahead], 0).astype(np.int64)
    stored = real & (position >= of.first[request])
    place = np.minimum(begin + of.local, num_rows - 1)
    kv_slot = np.where(stored, of.slot_mapping[place], -1)
    last = of.row_start[:-1] + of.base - 1 + of.accepted
    made = source, token, position, position - of.hidden[request], kv_slot, last
    heat = step.temperature[step.req_idx]
    return CommittedRows._make([*map(torch.from_numpy, made), heat])


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
    (start, base, path, accepted), (slots,) = views(rows), views([slot_mapping])
    position, root = np.arange(1, path.shape[1]), (start + base - 1)[:, None]
    source, target = root + path[:, 1:], root + position
    moves = (position <= accepted[:, None]) & (source != target)
    if moves.any():
        moved = (slots[np.minimum(x, num_rows - 1)] for x in (source, target))
        move_kv(kv_caches, *map(torch.from_numpy, (*moved, moves)))


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
