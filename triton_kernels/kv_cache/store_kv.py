"""Keys and values into a paged cache, in one launch; the torch reference is `commit/store.py`."""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def store_kv_triton(
    kv_cache: torch.Tensor,
    kv_index: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Launch the kernel, one program per entry; arguments as `store_kv` has them.

    Any strides will do, of the cache, too. Padding is stored nowhere.
    """
    _, heads, block_size, width = kv_cache.shape
    head_places, dim_places = next_power_of_2(heads), next_power_of_2(width // 2)
    if len(kv_index):
        _store_kv_kernel[(len(kv_index),)](
            kv_cache,
            *kv_cache.stride(),
            kv_index,
            kv_index.stride(0),
            key,
            *key.stride(),
            value,
            *value.stride(),
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
    kv_cache,  # [blocks, heads, places, 2D]
    block_stride,
    head_stride,
    place_stride,
    dim_stride,
    kv_index,  # [T] int64
    kv_index_stride,
    key,  # [T, heads, D]
    key_row,
    key_head,
    key_dim,
    value,  # [T, heads, D]
    value_row,
    value_head,
    value_dim,
    key_scale,  # [] fp32, of a float8 cache; None otherwise
    value_scale,  # [] fp32, of a float8 cache; None otherwise
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_PLACES: tl.constexpr,
    DIM_PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(kv_index + row * kv_index_stride).to(tl.int64)
    if at >= 0:
        head = tl.arange(0, HEAD_PLACES).to(tl.int64)[:, None]
        dim = tl.arange(0, DIM_PLACES)[None, :]
        inside = (head < HEADS) & (dim < SIZE)
        keys = tl.load(key + row * key_row + head * key_head + dim * key_dim, mask=inside)
        values = tl.load(value + row * value_row + head * value_head + dim * value_dim, mask=inside)
        if key_scale is not None:
            keys = _in_range(keys, tl.load(key_scale), LARGEST)
            values = _in_range(values, tl.load(value_scale), LARGEST)
        to = kv_cache + at // BLOCK_SIZE * block_stride + at % BLOCK_SIZE * place_stride
        to += head * head_stride + dim * dim_stride
        stored = kv_cache.dtype.element_ty
        tl.store(to, keys.to(stored), mask=inside)
        tl.store(to + SIZE * dim_stride, values.to(stored), mask=inside)


@jit
def _in_range(x, scale, LARGEST: tl.constexpr):
    """x / scale, rounded as torch does it; what is beyond float8 becomes its largest number."""
    x = tl.div_rn(x.to(tl.float32), scale)
    # NaN stays NaN, so that it is seen.
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
