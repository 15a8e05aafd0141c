"""The loops of `layers_numba.py`.

Tensors come as addresses, strides in bytes: an array would have to be unwrapped in every call.
Numbers are rounded where the references round them; of a row's sum of squares the last digits may
differ.
"""

from __future__ import annotations

import math

import numpy as np

from ..optional_numba import at_address, njit

_F = np.float32
_FAST = {"nsz", "contract", "reassoc"}


@njit
def _index(address, stride, place):
    """Number `place` of int64 numbers at an address; without any: `place`."""
    if address == 0:
        return place
    return at_address(address + 8 * stride * place, 8).view(np.int64)[0]


@njit(fastmath=_FAST)
def _load(address, count, size, out):
    """`count` elements of `size` bytes as fp32: bfloat16, or fp32."""
    if size == 2:
        short, bits = at_address(address, 2 * count).view(np.int16), out.view(np.int32)
        for i in range(count):
            bits[i] = np.int32(short[i]) << np.int32(16)
    else:
        wide = at_address(address, 4 * count).view(np.float32)
        for i in range(count):
            out[i] = wide[i]


@njit(fastmath=_FAST)
def _round(values, count, size):
    """To what `size` bytes hold: to the nearest, of two the even one."""
    if size == 2:
        bits = values.view(np.uint32)
        for i in range(count):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            bits[i] = (bits[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


@njit(fastmath=_FAST)
def _store(values, count, size, address):
    """Rounds `values`, too."""
    _round(values, count, size)
    if size == 2:
        short, bits = at_address(address, 2 * count).view(np.uint16), values.view(np.uint32)
        for i in range(count):
            short[i] = np.uint16(bits[i] >> np.uint32(16))
    else:
        wide = at_address(address, 4 * count).view(np.float32)
        for i in range(count):
            wide[i] = values[i]


@njit(fastmath=_FAST)
def _norm(values, weight, count, eps):
    """RMS norm in place, not rounded."""
    square = _F(0)
    for i in range(count):
        square += values[i] * values[i]
    scale = _F(1) / _F(math.sqrt(square / _F(count) + _F(eps)))
    for i in range(count):
        values[i] = values[i] * scale * weight[i]


@njit(fastmath=_FAST)
def _norm_rows(
    x,  # [rows, width]
    x_row,
    weight,  # [width]
    out,  # [rows, width]
    out_row,
    rows,
    width,
    size,
    eps,
):
    gain, values = np.empty(width, np.float32), np.empty(width, np.float32)
    _load(weight, width, size, gain)
    for row in range(rows):
        _load(x + row * x_row, width, size, values)
        _norm(values, gain, width, eps)
        _store(values, width, size, out + row * out_row)


@njit(fastmath=_FAST)
def _rotate(
    states,  # [entries, heads, D]
    entry_stride,
    head_stride,
    out,  # contiguous
    entries,
    heads,
    width,
    size,
    base,  # int64 per row of `each` entries
    base_stride,
    each,
    keep,  # rows that these are, int64; or nowhere
    keep_stride,
    turn,  # [D] fp32
    norm,  # [D], or nowhere
    eps,
):
    half = width // 2
    frequency = at_address(turn, 4 * width).view(np.float32)
    gain, x, y = np.empty(width, np.float32), np.empty(width, _F), np.empty(width, np.float32)
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    if norm:
        _load(norm, width, size, gain)
    for entry in range(entries):
        row = _index(keep, keep_stride, entry // each)
        position = _F(_index(base, base_stride, row) + entry % each)
        for i in range(half):
            angle = position * frequency[half + i]
            cos[i], sin[i] = math.cos(angle), math.sin(angle)
        _round(cos, half, size)
        _round(sin, half, size)
        for head in range(heads):
            _load(states + entry * entry_stride + head * head_stride, width, size, x)
            if norm:
                _norm(x, gain, width, eps)
                _round(x, width, size)
            # Rounded between the two products, as torch does it: a drafter was trained with that.
            for i in range(half):
                y[i] = x[i] * cos[i]
                y[half + i] = x[half + i] * cos[i]
            _round(y, width, size)
            for i in range(half):
                y[i] -= x[half + i] * sin[i]
                y[half + i] += x[i] * sin[i]
            _store(y, width, size, out + (entry * heads + head) * width * size)
