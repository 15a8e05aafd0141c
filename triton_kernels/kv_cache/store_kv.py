"""Keys and values into a paged cache, in one launch; the torch reference is `commit/store.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .paged_rows import CacheStrides, entry_offset

if TYPE_CHECKING:  # it needs numba
    from ..attention.cpu_packing import Packing

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def store_kv_triton(
    kv_cache: torch.Tensor,
    kv_index: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    packing: Packing | None = None,
) -> None:
    """Launch the kernel, one program per entry; arguments as `store_kv` has them.

    Any strides will do, of the cache, too. Padding is stored nowhere.
    """
    _, heads, block_size, width = kv_cache.shape
    head_places, dim_places = next_power_of_2(heads), next_power_of_2(width // 2)
    if len(kv_index):
        _store_kv_kernel[(len(kv_index),)](
            kv_cache,
            CacheStrides(*kv_cache.stride()),
            kv_index,
            kv_index.stride(0),
            key,
            key.stride(),
            value,
            value.stride(),
            key_scale,
            value_scale,
            HEADS=heads,
            SIZE=width // 2,
            BLOCK_SIZE=block_size,
            LARGEST=LARGEST,
            HEAD_PLACES=head_places,
            DIM_PLACES=dim_places,
            num_warps=4 if head_places * dim_places <= 2048 else 8,
        )


@jit(do_not_specialize=["kv_index_stride"])
def _store_kv_kernel(
    kv_cache_ptr,  # [blocks, heads, places, 2D]
    cache_strides,  # CacheStrides
    kv_index_ptr,  # [T] int64
    kv_index_stride,
    key_ptr,  # [T, heads, D]
    key_strides,  # of its three dimensions
    value_ptr,  # [T, heads, D]
    value_strides,
    key_scale_ptr,  # [] fp32, of a float8 cache; None otherwise
    value_scale_ptr,  # [] fp32, of a float8 cache; None otherwise
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_PLACES: tl.constexpr,
    DIM_PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(kv_index_ptr + row * kv_index_stride).to(tl.int64)
    if at >= 0:
        head = tl.arange(0, HEAD_PLACES).to(tl.int64)[:, None]
        dim = tl.arange(0, DIM_PLACES)[None, :]
        inside = (head < HEADS) & (dim < SIZE)
        place = row * key_strides[0] + head * key_strides[1] + dim * key_strides[2]
        keys = tl.load(key_ptr + place, mask=inside)
        place = row * value_strides[0] + head * value_strides[1] + dim * value_strides[2]
        values = tl.load(value_ptr + place, mask=inside)
        if key_scale_ptr is not None:
            keys = _in_range(keys, tl.load(key_scale_ptr), LARGEST)
            values = _in_range(values, tl.load(value_scale_ptr), LARGEST)
        to = kv_cache_ptr + entry_offset(at, cache_strides, BLOCK_SIZE)
        to += head * cache_strides.head + dim * cache_strides.dim
        stored = kv_cache_ptr.dtype.element_ty
        tl.store(to, keys.to(stored), mask=inside)
        tl.store(to + SIZE * cache_strides.dim, values.to(stored), mask=inside)


@jit
def _in_range(x, scale, LARGEST: tl.constexpr):
    """x / scale, rounded as torch does it; what is beyond float8 becomes its largest number."""
    x = tl.div_rn(x.to(tl.float32), scale)
    # NaN stays NaN, so that it is seen.
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
