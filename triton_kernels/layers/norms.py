"""RMS norms, fused with a sum or with another norm."""

from __future__ import annotations

import torch
from torch import nn

from ..op import op
from ..optional_triton import jit, next_power_of_2, tl


def add_norm_triton(
    left: torch.Tensor, right: torch.Tensor, norm: nn.RMSNorm, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel, one program per entry; strides are arbitrary."""
    if max(left.dim(), right.dim()) > 3 or not left.dtype == right.dtype == norm.weight.dtype:
        return add_norm.reference(left, right, norm, keep)
    shape = right.shape if keep is not None else torch.broadcast_shapes(left.shape, right.shape)
    total, normed = (torch.empty(shape, dtype=right.dtype, device=right.device) for _ in range(2))
    if keep is None:
        left = left.expand(shape)
    left, right = (x[:, None] if x.dim() == 2 else x for x in (left, right.expand(shape)))
    rows, places, size = right.shape
    _add_norm_kernel[(rows * places,)](
        left,
        left.stride(),
        right,
        right.stride(),
        keep,
        0 if keep is None else keep.stride(0),
        norm.weight,
        total,
        normed,
        norm.eps,
        PLACES=places,
        SIZE=size,
        num_warps=_warps(size),
    )
    return total, normed


def norm_pair_triton(
    left: torch.Tensor,
    right: torch.Tensor,
    left_norm: nn.RMSNorm,
    right_norm: nn.RMSNorm,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel, two programs per row; elements of a row are consecutive."""
    if not left.dtype == right.dtype == left_norm.weight.dtype:  # under autocast
        return norm_pair.reference(left, right, left_norm, right_norm, rows)
    *lead, size = right.shape
    out = torch.empty(*lead, 2 * size, dtype=right.dtype, device=right.device)
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    _norm_pair_kernel[(len(right), 2)](
        left,
        left.stride(0),
        rows,
        right,
        right.stride(0),
        left_norm.weight,
        right_norm.weight,
        out,
        left_norm.eps,
        SIZE=size,
        num_warps=_warps(size),
    )
    return out


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8


@op(add_norm_triton)
def add_norm(
    left: torch.Tensor, right: torch.Tensor, norm: nn.RMSNorm, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum and its norm: (left[keep] + right, norm of it).

    Args:
        left: [T, ..., H].
        right: [Q, ..., H]; the two are broadcast.
        norm: over H, with an epsilon.
        keep: [Q] int64, rows of `left` to use (then no broadcast); None: all, and Q = T.
    """
    total = (left if keep is None else left[keep]) + right
    return total, norm(total)


@op(norm_pair_triton)
def norm_pair(
    left: torch.Tensor,
    right: torch.Tensor,
    left_norm: nn.RMSNorm,
    right_norm: nn.RMSNorm,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return two normed tensors [..., H] concatenated, [..., 2H]; the norms share an epsilon.

    rows: [T] int64, rows of `left` [n, H] for those of `right`; None: all.
    """
    left = left if rows is None else left[rows]
    return torch.cat([left_norm(left), right_norm(right)], dim=-1)


@jit(do_not_specialize=["keep_stride"])
def _add_norm_kernel(
    left_ptr,  # [T, PLACES, SIZE]
    left_strides,
    right_ptr,  # [Q, PLACES, SIZE]
    right_strides,
    keep_ptr,  # [Q]; or None
    keep_stride,
    weight_ptr,  # [SIZE]
    total_ptr,  # [Q, PLACES, SIZE] contiguous
    normed_ptr,  # [Q, PLACES, SIZE] contiguous
    eps,
    PLACES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One entry."""
    entry = tl.program_id(0).to(tl.int64)
    row, place = entry // PLACES, entry % PLACES
    column = tl.arange(0, next_power_of_2(SIZE))
    inside = column < SIZE
    right_ptr += row * right_strides[0] + place * right_strides[1]
    if keep_ptr is not None:
        row = tl.load(keep_ptr + row * keep_stride).to(tl.int64)
    left_ptr += row * left_strides[0] + place * left_strides[1]
    x = tl.load(left_ptr + column * left_strides[2], mask=inside, other=0.0).to(tl.float32)
    x += tl.load(right_ptr + column * right_strides[2], mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    x = x.to(dtype)
    tl.store(total_ptr + entry * SIZE + column, x, mask=inside)
    x = _rms_norm(x.to(tl.float32), weight_ptr, column, eps, SIZE)
    tl.store(normed_ptr + entry * SIZE + column, x.to(dtype), mask=inside)


@jit
def _norm_pair_kernel(
    left_ptr,  # [n, SIZE]
    left_stride,
    rows_ptr,  # [T] int64; or None
    right_ptr,  # [T, SIZE]
    right_stride,
    left_weight_ptr,  # [SIZE]
    right_weight_ptr,  # [SIZE]
    out_ptr,  # [T, 2 SIZE] contiguous
    eps,
    SIZE: tl.constexpr,
):
    """One half of a row."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, next_power_of_2(SIZE))
    inside = column < SIZE
    at, weight = right_ptr + row * right_stride, right_weight_ptr
    if half == 0:
        source = row if rows_ptr is None else tl.load(rows_ptr + row)
        at, weight = left_ptr + source * left_stride, left_weight_ptr
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    x = _rms_norm(x, weight, column, eps, SIZE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (2 * row + half) * SIZE + column, x, mask=inside)


@jit
def _rms_norm(x, weight_ptr, column, eps, SIZE: tl.constexpr):
    """x: [≥ SIZE] float32, 0 from SIZE on."""
    gain = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * gain
