"""A linear layer with float8 e4m3 weights and one scale per output.

    out[t, n] = scale[n] · Σ_k x[t, k] · weight[n, k]

A few dozen rows are bound by reading weights, so activations are not quantized. Up to 32 rows are
multiplied in float16 unless they are float32, since the hardware converts pairs of float8 numbers
to it; activations are clamped at 65,504. Each warp sums its own part of K, since products onto one
sum wait for each other.
"""

from __future__ import annotations

import torch
from torch import nn

from ..op import op
from ..optional_triton import cdiv, jit, next_power_of_2, tl

ALL = slice(None)
_PARTS = 8
"""Warps of a program over at most 32 rows."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> float8 e4m3 [N, K], and [N] fp32 so that their product is the weight.

    The largest weight of a row becomes the largest e4m3 number.
    """
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale[:, None]).to(torch.float8_e4m3fn), scale


def fp8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in `fp8_linear`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    num_rows, (out_size, in_size) = len(rows), weight.shape
    out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    # Few rows: narrow column tiles keep all SMs reading. Many: arithmetic, square tiles.
    few, full = num_rows <= 64, x.dtype == torch.float32
    square = 64 if full else 128
    block_m = max(16, next_power_of_2(num_rows)) if few else square
    block_n = square if not few else 32 if out_size <= 8192 else 64
    # With more rows a warp has several sums at hand, and activations take long to convert.
    parts = _PARTS if num_rows <= 32 and not full else 1
    block_k = 32 if full else 256 if few else 64
    if parts > 1:  # as much at once as fits three times over
        block_k = min(8192 // block_m, 16384 // block_n)
    _fp8_linear_kernel[(cdiv(out_size, block_n), cdiv(num_rows, block_m))](
        rows,
        weight,
        scale,
        residual,
        out,
        num_rows,
        out_size,
        in_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=parts,
        num_warps=parts if parts > 1 else 4 if few else 8,
        num_stages=3,
    )
    return out.view(*x.shape[:-1], out_size)


@op(fp8_linear_triton)
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] of any float dtype, weight [N, K] e4m3, scale [N] fp32 -> [..., N] as x.

    The kernel needs compute capability 8.9 or later.

    Args:
        residual: [..., N], contiguous; added before the result is rounded.
    """
    # Three bits of mantissa and four of exponent fit into every dtype of x.
    out = (x @ weight.to(x.dtype).T).mul(scale)
    return (out if residual is None else residual + out).to(x.dtype)


class Fp8Linear(nn.Module):
    """`linear` without a gradient, weights in 8 bits."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor, outputs: slice = ALL) -> torch.Tensor:
        """[..., in] -> [..., out], in the dtype of x; outputs: which of them are wanted."""
        out = fp8_linear(x, self.weight[outputs], self.scale[outputs])
        return out if self.bias is None else out + self.bias[outputs]


@jit(do_not_specialize=["num_rows"])
def _fp8_linear_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K] float8 e4m3
    scale_ptr,  # [N] fp32
    residual_ptr,  # [T, N]; or None
    out_ptr,  # [T, N]
    num_rows,  # T
    out_size,  # N
    in_size,  # K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of BLOCK_K, each summed up by itself; 1: in the activations' dtype
):
    """BLOCK_N outputs of BLOCK_M rows.

    The weights are the left factor, which the matrix units can read from registers.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    of_column = column.to(tl.int64)[:, None] * in_size
    of_row = row.to(tl.int64)[None, :] * in_size
    column_in, row_in = (column < out_size)[:, None], (row < num_rows)[None, :]
    if PARTS == 1:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in range(0, in_size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            k_in = k < in_size
            w = tl.load(
                weight_ptr + of_column + k[None, :], mask=column_in & k_in[None, :], other=0.0
            )
            a = tl.load(x_ptr + of_row + k[:, None], mask=row_in & k_in[:, None], other=0.0)
            total = tl.dot(w.to(a.dtype), a, total, input_precision="tf32x3")
    else:
        sums = tl.zeros([PARTS, BLOCK_N, BLOCK_M], dtype=tl.float32)
        within = tl.arange(0, BLOCK_K // PARTS)
        part = tl.arange(0, PARTS)[:, None, None] * (BLOCK_K // PARTS)
        for start in range(0, in_size, BLOCK_K):
            k = start + part + within[None, None, :]
            inside = column_in[None, :, :] & (k < in_size)
            w = tl.load(weight_ptr + of_column[None, :, :] + k, mask=inside, other=0.0)
            k = start + part + within[None, :, None]
            inside = row_in[None, :, :] & (k < in_size)
            a = tl.load(x_ptr + of_row[None, :, :] + k, mask=inside, other=0.0).to(tl.float32)
            a = tl.minimum(tl.maximum(a, -65504.0), 65504.0).to(tl.float16)
            sums = tl.dot(w.to(tl.float16), a, sums)
        total = tl.sum(sums, 0)
    factor = tl.load(scale_ptr + column, mask=column < out_size, other=0.0)
    total = total * factor[:, None]
    cell, inside = row.to(tl.int64)[None, :] * out_size + column[:, None], row_in & column_in
    if residual_ptr is not None:
        total += tl.load(residual_ptr + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + cell, total.to(out_ptr.dtype.element_ty), mask=inside)
