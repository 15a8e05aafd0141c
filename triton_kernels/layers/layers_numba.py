"""What lies between the products of a drafter's decoder layer, for CPUs: one pass over each row.

`norms.py`, `layer_shift.py`, `rope.py` and `gather_states.py` say what is computed. The few rows of
a decode step are soon done; what torch needs for every one of its dozens of calls is not. Numbers
are rounded where the references round them; of a row's sum of squares the last digits may differ.

Tensors come as addresses, strides in bytes: an array would have to be unwrapped in every call.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from ..optional_numba import at_address, njit, takes

_F = np.float32
_FAST = {"nsz", "contract", "reassoc"}
_SIZES = (torch.bfloat16, torch.float32)


def loops_take(where: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the loops of this file take tensors of a dtype that lie where another does."""
    return dtype in _SIZES and takes(where) and not torch.is_autocast_enabled("cpu")


def runs_loop(*tensors: torch.Tensor) -> bool:
    """Whether the loops of this file take tensors: of one dtype, on a CPU, without a gradient, each
    row's elements side by side."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    dtype = tensors[0].dtype
    alike = all(x.dtype == dtype and x.stride(-1) == 1 for x in tensors)
    return alike and loops_take(tensors[0], dtype)


def add_norm_numba(
    left: torch.Tensor,
    right: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `norms.add_norm` has them, of at most three dimensions."""
    if keep is None:
        left, right = torch.broadcast_tensors(left, right)
    total, normed = (torch.empty(right.shape, dtype=right.dtype) for _ in range(2))
    left, right = (x[:, None] if x.dim() == 2 else x for x in (left, right))
    size = right.element_size()
    _add_norm(
        left.data_ptr(), left.stride(0) * size, left.stride(1) * size,
        right.data_ptr(), right.stride(0) * size, right.stride(1) * size,
        *_indices(keep), weight.data_ptr(), total.data_ptr(), normed.data_ptr(),
        right.shape[0], right.shape[1], right.shape[2], size, eps,
    )  # fmt: skip
    return total, normed


def norm_pair_numba(
    left: torch.Tensor,
    right: torch.Tensor,
    left_weight: torch.Tensor,
    right_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Arguments as `norms.norm_pair_triton` has them."""
    width, size = left.shape[-1], left.element_size()
    out = torch.empty(*left.shape[:-1], 2 * width, dtype=left.dtype)
    for place, (x, weight) in enumerate(((left, left_weight), (right, right_weight))):
        rows = x.flatten(0, -2)
        _norm_rows(
            rows.data_ptr(), rows.stride(0) * size, weight.data_ptr(),
            out.data_ptr() + place * width * size, 2 * width * size, len(rows), width, size, eps,
        )  # fmt: skip
    return out


def rms_norm_numba(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] contiguous, weight [H] -> [..., H]."""
    width, size = x.shape[-1], x.element_size()
    out = torch.empty_like(x)
    _norm_rows(
        x.data_ptr(), width * size, weight.data_ptr(), out.data_ptr(), width * size,
        x.numel() // width, width, size, eps,
    )  # fmt: skip
    return out


def beside_previous_numba(hidden: torch.Tensor) -> torch.Tensor:
    """What eq. 3 multiplies: [h[t, k]; h[t, k − 1]]. hidden [T, K, H] contiguous -> [T, K, 2H]."""
    rows, places, width = hidden.shape
    out = hidden.new_empty(rows, places, 2 * width)
    _beside_previous(hidden.data_ptr(), out.data_ptr(), rows, places, width * hidden.element_size())
    return out


def gather_states_numba(states: list[torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """Arguments as `gather_states.gather_states_triton` has them."""
    width, size = states[0].shape[1], states[0].element_size()
    out = states[0].new_empty(len(source), len(states) * width)
    for layer, state in enumerate(states):
        _gather_rows(
            state.data_ptr(), state.stride(0) * size, *_indices(source),
            out.data_ptr() + layer * width * size, out.shape[1] * size, len(source), width * size,
        )  # fmt: skip
    return out


def rotate_pair_numba(
    query: torch.Tensor,
    key: torch.Tensor,
    base: torch.Tensor,
    turn: torch.Tensor,
    keep: torch.Tensor | None = None,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `rope.rotate_pair` and `rope.Rope` have them."""
    size, each = key.element_size(), key.shape[:-2].numel() // max(1, len(base))
    results = []
    for place, (x, kept) in enumerate(((query, keep), (key, None))):
        out = torch.empty(x.shape, dtype=x.dtype)
        entries = x.flatten(0, -3)
        norm = 0 if norms is None else norms[place].weight.data_ptr()
        _rotate(
            entries.data_ptr(), entries.stride(0) * size, entries.stride(1) * size,
            out.data_ptr(), *entries.shape, size,
            base.data_ptr(), base.stride(0), each, *_indices(kept), turn.data_ptr(),
            norm, 0.0 if norms is None else norms[place].eps,
        )  # fmt: skip
        results.append(out)
    return results[0], results[1]


def _indices(index: torch.Tensor | None) -> tuple[int, int]:
    """Address and stride, in elements, of int64 numbers; 0, 0 without any."""
    return (0, 0) if index is None else (index.data_ptr(), index.stride(0))


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
def _add_norm(
    left, left_row, left_place,  # [T, places, width]
    right, right_row, right_place,  # [Q, places, width]
    keep, keep_stride,  # [Q] int64, or nowhere
    weight,  # [width]
    total, normed,  # [Q, places, width] contiguous
    rows, places, width, size, eps,
):  # fmt: skip
    gain, x, y = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, _F)
    _load(weight, width, size, gain)
    for row in range(rows):
        of = _index(keep, keep_stride, row)
        for place in range(places):
            _load(left + of * left_row + place * left_place, width, size, x)
            _load(right + row * right_row + place * right_place, width, size, y)
            for i in range(width):
                x[i] += y[i]
            at = (row * places + place) * width * size
            _store(x, width, size, total + at)
            _norm(x, gain, width, eps)
            _store(x, width, size, normed + at)


@njit(fastmath=_FAST)
def _norm_rows(
    x, x_row,  # [rows, width]
    weight,  # [width]
    out, out_row,  # [rows, width]
    rows, width, size, eps,
):  # fmt: skip
    gain, values = np.empty(width, np.float32), np.empty(width, np.float32)
    _load(weight, width, size, gain)
    for row in range(rows):
        _load(x + row * x_row, width, size, values)
        _norm(values, gain, width, eps)
        _store(values, width, size, out + row * out_row)


@njit
def _copy(source, target, count):
    """`count` bytes."""
    read, write = at_address(source, count), at_address(target, count)
    for i in range(count):
        write[i] = read[i]


@njit
def _beside_previous(
    hidden,  # [T, K, H]
    out,  # [T, K, 2H]
    rows, places,
    width,  # bytes of H elements
):  # fmt: skip
    for row in range(rows):
        for place in range(places):
            entry = row * places + place
            before = entry - (1 if place else 0)
            _copy(hidden + entry * width, out + 2 * entry * width, width)
            _copy(hidden + before * width, out + (2 * entry + 1) * width, width)


@njit
def _gather_rows(states, state_row, source, source_stride, out, out_row, rows, width):
    for row in range(rows):
        of = _index(source, source_stride, row)
        _copy(states + of * state_row, out + row * out_row, width)


@njit(fastmath=_FAST)
def _rotate(
    states, entry_stride, head_stride,  # [entries, heads, D]
    out,  # contiguous
    entries, heads, width, size,
    base, base_stride, each,  # int64 per row of `each` entries
    keep, keep_stride,  # rows that these are, int64; or nowhere
    turn,  # [D] fp32
    norm, eps,  # [D], or nowhere
):  # fmt: skip
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
