"""Packed KV cache layout for CPU vector units.

vLLM's CPU attention kernel stores, per block and KV head, first the keys and then the values of its
N entries of D numbers each:

* for AMX tiles (bf16) keys as [N/16, D/2, 16 entries, 2], values as [D/16, N/2, 16 numbers, 2],
  so that pairs of summands are neighbours;
* for other vector units, and for 8-bit caches, keys as [D, N] and values as [N, D].

Both fill a page of vLLM's cache exactly, for either order of heads and entries. The loops here
store and move entries; `cpu_attention.py` attends to them. This module needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..optional_numba import njit
from .cpu_vectors import BF16, BYTES, FP8, FP16, FP32, view

ELEMENTS = {
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e4m3fn: FP8,
}
GROUP = 32  # entries, and head dimensions, per kernel step


class Packing(NamedTuple):
    """Geometry of a packed cache.

    Attributes:
        element: `ELEMENTS` of its dtype.
        amx: packed for AMX tiles; bf16 only.
        kv_heads, block_size, head_dim: H, N and D.
    """

    element: int
    amx: bool
    kv_heads: int
    block_size: int
    head_dim: int

    @property
    def head_stride(self) -> int:
        """Elements between the KV heads of a block."""
        return 2 * self.block_size * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, N and D."""
        return self[2:]


def packing_of(kv_cache: torch.Tensor, amx: bool) -> Packing | None:
    """Return the packing of a cache [blocks, kv heads, N, 2D], or None if it cannot be packed.

    A page must be contiguous, and N and D multiples of 32.
    """
    _, heads, size, width = kv_cache.shape
    reach = 1 + sum(
        (n - 1) * stride for n, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:])
    )
    whole = reach == heads * size * width
    if kv_cache.dtype not in ELEMENTS or size % GROUP or width // 2 % GROUP or not whole:
        return None
    amx = amx and kv_cache.dtype == torch.bfloat16
    return Packing(ELEMENTS[kv_cache.dtype], amx, heads, size, width // 2)


def store_packed(
    kv_cache: torch.Tensor,
    packing: Packing,
    kv_index: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Store keys and values [T, H, D], of the cache's dtype, at their entries [T] int64; negative:
    nowhere."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    cache, entries = (kv_cache.data_ptr(), kv_cache.stride(0)), kv_index.contiguous()
    rows = ((x.data_ptr(), *x.stride()[:2]) for x in (key, value))
    layout = packing.sizes, packing.amx, _LIKE[kv_cache.element_size()]
    _store(cache, entries.data_ptr(), len(entries), *rows, *layout)


def move_packed(
    pointers: torch.Tensor,
    block_stride: int,
    packing: Packing,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Move entries from source to target slots in every layer, in order.

    A path moves down: no source is an earlier row's target.

    Args:
        pointers: [layers] int64, address of each layer's cache.
        block_stride: elements between blocks, in every layer.
        source, target: [...] int64, of one shape; negative: no move.
    """
    source, target = source.contiguous(), target.contiguous()
    caches, slots = (pointers.data_ptr(), len(pointers)), (source.data_ptr(), target.data_ptr())
    layout = packing.sizes, packing.amx, _LIKE[BYTES[packing.element]]
    _move(caches, block_stride, slots, source.numel(), *layout)


_LIKE = {size: np.empty(0, f"i{size}") for size in (1, 2, 4)}  # elements of so many bytes


@njit
def _key_place(kv_index, dim, block_size, head_dim, amx):
    if amx:
        return kv_index // 16 * 16 * head_dim + dim // 2 * 32 + kv_index % 16 * 2 + dim % 2
    return dim * block_size + kv_index


@njit
def _value_place(kv_index, dim, block_size, head_dim, amx):
    if amx:
        inside = dim // 16 * 16 * block_size + kv_index // 2 * 32 + dim % 16 * 2 + kv_index % 2
    else:
        inside = kv_index * head_dim + dim
    return block_size * head_dim + inside


@njit(error_model="numpy")
def _store(cache, entries, count, keys, values, sizes, amx, like):
    """cache: address and block stride; keys, values: address, strides of rows and heads."""
    kv_heads, block_size, head_dim = sizes
    kv_index, head_stride = view(entries, count, np.int64), 2 * block_size * head_dim
    size, kind = like.itemsize, like.dtype
    for row in range(count):
        if kv_index[row] < 0:
            continue
        block, place = kv_index[row] // block_size, kv_index[row] % block_size
        for head in range(kv_heads):
            at = cache[0] + (block * cache[1] + head * head_stride) * size
            page = view(at, head_stride, kind)
            key = view(keys[0] + (row * keys[1] + head * keys[2]) * size, head_dim, kind)
            value = view(values[0] + (row * values[1] + head * values[2]) * size, head_dim, kind)
            for dim in range(head_dim):
                page[_key_place(place, dim, block_size, head_dim, amx)] = key[dim]
                page[_value_place(place, dim, block_size, head_dim, amx)] = value[dim]


@njit(error_model="numpy")
def _move(caches, block_stride, slots, count, sizes, amx, like):
    """caches: address and number of addresses; slots: addresses of sources and targets."""
    kv_heads, block_size, head_dim = sizes
    source, target = view(slots[0], count, np.int64), view(slots[1], count, np.int64)
    cache, head_stride = view(caches[0], caches[1], np.int64), 2 * block_size * head_dim
    size, kind = like.itemsize, like.dtype
    for layer in range(len(cache)):
        for row in range(count):
            if source[row] < 0 or target[row] < 0:
                continue
            old, new = source[row] % block_size, target[row] % block_size
            read = cache[layer] + source[row] // block_size * block_stride * size
            write = cache[layer] + target[row] // block_size * block_stride * size
            for head in range(kv_heads):
                at = head * head_stride * size
                there = view(read + at, head_stride, kind)
                here = view(write + at, head_stride, kind)
                for dim in range(head_dim):
                    place = _key_place(old, dim, block_size, head_dim, amx)
                    here[_key_place(new, dim, block_size, head_dim, amx)] = there[place]
                    place = _value_place(old, dim, block_size, head_dim, amx)
                    here[_value_place(new, dim, block_size, head_dim, amx)] = there[place]
