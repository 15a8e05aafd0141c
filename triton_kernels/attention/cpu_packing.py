"""Packed KV cache layout for CPU vector units.

vLLM's attention kernel on a CPU wants, per block and KV head, first the keys and then the values
of its N entries of D numbers each:

* for AMX tiles (bf16) keys as [N/16, D/2, 16 entries, 2], values as [D/16, N/2, 16 numbers, 2],
  so that two numbers that are multiplied and added together are neighbours;
* for other vector units, and for 8-bit caches, keys as [D, N] and values as [N, D].

Both fill a page of vLLM's cache exactly, for either order of heads and entries.
The loops here store and move entries; attention over them is `cpu_attention.py`. Importing this
module needs numba.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from numba import njit, types

from .cpu_ir import BF16, FP8, FP16, FP32, view_of

ELEMENTS = {
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e4m3fn: FP8,
}
GROUP = 32  # entries, and head dimensions, that the kernels take together


class Packing(NamedTuple):
    """The geometry of a packed cache.

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
        """Elements from one KV head's part of a block to the next."""
        return 2 * self.block_size * self.head_dim


def packing_of(kv_cache: torch.Tensor, amx: bool) -> Packing | None:
    """The packing of a cache [blocks, kv heads, N, 2D], or None if it cannot be packed.

    A page has to be in one piece, and N and D multiples of 32.
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
    store, _ = _loops(kv_cache.element_size(), packing.amx)
    store(
        kv_cache.data_ptr(),
        kv_cache.stride(0),
        packing.head_stride,
        kv_index.contiguous().data_ptr(),
        len(kv_index),
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        packing.kv_heads,
        packing.block_size,
        packing.head_dim,
    )


def move_packed(
    pointers: torch.Tensor,
    block_stride: int,
    packing: Packing,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """In every layer, move entries from source to target slots, one after the other.

    A path moves down: no source is an earlier row's target.

    Args:
        pointers: [layers] int64, the address of each layer's cache.
        block_stride: elements from block to block, in every layer.
        source, target: [...] int64, alike; negative: nothing moves.
    """
    size = {FP32: 4, FP8: 1}.get(packing.element, 2)
    _, move = _loops(size, packing.amx)
    source, target = source.contiguous(), target.contiguous()
    move(
        pointers.data_ptr(),
        len(pointers),
        block_stride,
        packing.head_stride,
        source.data_ptr(),
        target.data_ptr(),
        source.numel(),
        packing.kv_heads,
        packing.block_size,
        packing.head_dim,
    )


@lru_cache
def _loops(size: int, amx: bool):
    """(store, move) of elements of `size` bytes."""
    elements = view_of({1: types.int8, 2: types.int16, 4: types.int32}[size])
    longs = view_of(types.int64)

    @njit(nogil=True)
    def key_place(kv_index, dim, block_size, head_dim):
        if amx:
            return kv_index // 16 * 16 * head_dim + dim // 2 * 32 + kv_index % 16 * 2 + dim % 2
        return dim * block_size + kv_index

    @njit(nogil=True)
    def value_place(kv_index, dim, block_size, head_dim):
        if amx:
            inside = dim // 16 * 16 * block_size + kv_index // 2 * 32 + dim % 16 * 2 + kv_index % 2
        else:
            inside = kv_index * head_dim + dim
        return block_size * head_dim + inside

    @njit(nogil=True, error_model="numpy")
    def store(
        cache,
        block_stride,
        head_stride,
        entries,
        count,
        keys,
        key_row,
        key_head,
        values,
        value_row,
        value_head,
        kv_heads,
        block_size,
        head_dim,
    ):
        kv_index = longs(entries, count)
        for row in range(count):
            if kv_index[row] < 0:
                continue
            block, place = kv_index[row] // block_size, kv_index[row] % block_size
            for head in range(kv_heads):
                at = cache + (block * block_stride + head * head_stride) * size
                page = elements(at, head_stride)
                key = elements(keys + (row * key_row + head * key_head) * size, head_dim)
                value = elements(values + (row * value_row + head * value_head) * size, head_dim)
                for dim in range(head_dim):
                    page[key_place(place, dim, block_size, head_dim)] = key[dim]
                    page[value_place(place, dim, block_size, head_dim)] = value[dim]

    @njit(nogil=True, error_model="numpy")
    def move(
        caches,
        layers,
        block_stride,
        head_stride,
        sources,
        targets,
        count,
        kv_heads,
        block_size,
        head_dim,
    ):
        source, target = longs(sources, count), longs(targets, count)
        cache = longs(caches, layers)
        for layer in range(layers):
            for row in range(count):
                if source[row] < 0 or target[row] < 0:
                    continue
                old, new = source[row] % block_size, target[row] % block_size
                read = cache[layer] + source[row] // block_size * block_stride * size
                write = cache[layer] + target[row] // block_size * block_stride * size
                for head in range(kv_heads):
                    at = head * head_stride * size
                    there, here = (
                        elements(read + at, head_stride),
                        elements(write + at, head_stride),
                    )
                    for dim in range(head_dim):
                        place = key_place(old, dim, block_size, head_dim)
                        here[key_place(new, dim, block_size, head_dim)] = there[place]
                        place = value_place(old, dim, block_size, head_dim)
                        here[value_place(new, dim, block_size, head_dim)] = there[place]

    return store, move
