"""RMS norm for CPUs: one pass over each row, faster than torch's call for a few rows.

Tensors are passed as addresses to avoid unwrapping arrays; strides are in bytes. Numbers are
rounded where torch rounds them; only the last digits of the sum of squares may differ.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..optional_numba import at_address, njit, takes

_F = np.float32
_FAST = {"nsz", "contract", "reassoc"}


def runs_loop(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the loop supports them: contiguous, one dtype, on a CPU, no gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    alike = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
    return alike and x.is_contiguous() and takes(x) and not torch.is_autocast_enabled("cpu")


def rms_norm_numba(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] contiguous, weight [H] -> [..., H]."""
    width, out = x.shape[-1], torch.empty_like(x)
    rows, size = x.numel() // width, x.element_size()
    _norm_rows(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, size, eps)
    return out


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
def _store(values, count, size, address):
    """Store elements of `size` bytes, rounded to nearest even."""
    if size == 2:
        short, bits = at_address(address, 2 * count).view(np.uint16), values.view(np.uint32)
        for i in range(count):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            short[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    else:
        wide = at_address(address, 4 * count).view(np.float32)
        for i in range(count):
            wide[i] = values[i]


@njit(fastmath=_FAST)
def _norm_rows(x, weight, out, rows, width, size, eps):
    """x and out: [rows, width], weight: [width], of `size` bytes each."""
    gain, values = np.empty(width, np.float32), np.empty(width, np.float32)
    _load(weight, width, size, gain)
    for row in range(rows):
        _load(x + row * width * size, width, size, values)
        square = _F(0)
        for i in range(width):
            square += values[i] * values[i]
        scale = _F(1) / _F(math.sqrt(square / _F(width) + _F(eps)))
        for i in range(width):
            values[i] = values[i] * scale * gain[i]
        _store(values, width, size, out + row * width * size)
