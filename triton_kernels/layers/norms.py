"""RMS norms in one launch with what is before or beside them: a sum, or another norm."""

from __future__ import annotations

from typing import Protocol

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .layers_numba import add_norm_numba, norm_pair_numba, runs_loop
from .no_gradient import runs_kernel


class Norm(Protocol):
    """An RMS norm over H that was given its epsilon; torch's own may lack one."""

    eps: float

    @property
    def weight(self) -> torch.Tensor: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def add_norm(
    left: torch.Tensor,
    right: torch.Tensor,
    norm: Norm,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum and its norm: (left[keep] + right, norm of it).

    Tensors of at most three dimensions go to the kernel, or on a CPU to a loop, unless a gradient
    is needed; everything else to the reference.

    Args:
        left: [T, ..., H].
        right: [Q, ..., H]; the two are broadcast.
        norm: over H.
        keep: [Q] int64, which rows of `left` are meant (then both have all their dimensions);
            None: all, and Q = T.
    """
    if max(left.dim(), right.dim()) <= 3:
        if runs_kernel(left, right, norm.weight):
            return add_norm_triton(left, right, norm.weight, norm.eps, keep)
        if runs_loop(left, right, norm.weight):
            return add_norm_numba(left, right, norm.weight, norm.eps, keep)
    return add_norm_reference(left, right, norm, keep)


def add_norm_reference(
    left: torch.Tensor,
    right: torch.Tensor,
    norm: Norm,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `add_norm` has them; differentiable."""
    total = (left if keep is None else left[keep]) + right
    return total, norm(total)


def norm_pair(
    left: torch.Tensor, right: torch.Tensor, left_norm: Norm, right_norm: Norm
) -> torch.Tensor:
    """Two tensors [..., H], each normed, side by side [..., 2H].

    They go to the kernel, or on a CPU to a loop, unless a gradient is needed; then to the
    reference. The norms have one epsilon.
    """
    weights = left_norm.weight, right_norm.weight
    if runs_kernel(left, right, *weights):
        return norm_pair_triton(left, right, *weights, left_norm.eps)
    if runs_loop(left, right, *weights):
        return norm_pair_numba(left, right, *weights, left_norm.eps)
    return norm_pair_reference(left, right, left_norm, right_norm)


def norm_pair_reference(
    left: torch.Tensor, right: torch.Tensor, left_norm: Norm, right_norm: Norm
) -> torch.Tensor:
    """Arguments as `norm_pair` has them; differentiable."""
    return torch.cat([left_norm(left), right_norm(right)], dim=-1)


def add_norm_triton(
    left: torch.Tensor,
    right: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel, one program per entry; any strides will do."""
    shape = right.shape if keep is not None else torch.broadcast_shapes(left.shape, right.shape)
    total, normed = (torch.empty(shape, dtype=right.dtype, device=right.device) for _ in range(2))
    if keep is None:
        left = left.expand(shape)
    left, right = (x[:, None] if x.dim() == 2 else x for x in (left, right.expand(shape)))
    rows, places, size = right.shape
    columns = next_power_of_2(size)
    if rows * places:
        _add_norm_kernel[(rows * places,)](
            left,
            *left.stride(),
            right,
            *right.stride(),
            keep,
            0 if keep is None else keep.stride(0),
            weight,
            total,
            normed,
            size,
            eps,
            PLACES=places,
            COLUMNS=columns,
            num_warps=_warps(columns),
        )
    return total, normed


def norm_pair_triton(
    left: torch.Tensor,
    right: torch.Tensor,
    left_weight: torch.Tensor,
    right_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launch the kernel, two programs per row; any strides will do."""
    size = left.shape[-1]
    out = torch.empty(*left.shape[:-1], 2 * size, dtype=left.dtype, device=left.device)
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    columns = next_power_of_2(size)
    if len(left):
        _norm_pair_kernel[(len(left), 2)](
            left,
            *left.stride(),
            right,
            *right.stride(),
            left_weight,
            right_weight,
            out,
            size,
            eps,
            COLUMNS=columns,
            num_warps=_warps(columns),
        )
    return out


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8


@jit(do_not_specialize=["keep_stride"])
def _add_norm_kernel(
    left,  # [T, PLACES, size]
    left_row,
    left_place,
    left_column,
    right,  # [Q, PLACES, size]
    right_row,
    right_place,
    right_column,
    keep,  # [Q]; or None
    keep_stride,
    weight,  # [size]
    total,  # [Q, PLACES, size] contiguous
    normed,  # [Q, PLACES, size] contiguous
    size,
    eps,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,  # >= size
):
    """One entry."""
    entry = tl.program_id(0).to(tl.int64)
    row, place = entry // PLACES, entry % PLACES
    column = tl.arange(0, COLUMNS)
    inside = column < size
    right += row * right_row + place * right_place
    if keep is not None:
        row = tl.load(keep + row * keep_stride).to(tl.int64)
    left += row * left_row + place * left_place
    x = tl.load(left + column * left_column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(right + column * right_column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = total.dtype.element_ty
    x = x.to(dtype)
    tl.store(total + entry * size + column, x, mask=inside)
    x = _rms_norm(x.to(tl.float32), weight, column, size, eps)
    tl.store(normed + entry * size + column, x.to(dtype), mask=inside)


@jit
def _norm_pair_kernel(
    left,  # [rows, size]
    left_row,
    left_column,
    right,  # [rows, size]
    right_row,
    right_column,
    left_weight,  # [size]
    right_weight,  # [size]
    out,  # [rows, 2 size] contiguous
    size,
    eps,
    COLUMNS: tl.constexpr,  # >= size
):
    """One half of a row."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < size
    if half == 0:
        x = tl.load(left + row * left_row + column * left_column, mask=inside, other=0.0)
        x = _rms_norm(x.to(tl.float32), left_weight, column, size, eps)
    else:
        x = tl.load(right + row * right_row + column * right_column, mask=inside, other=0.0)
        x = _rms_norm(x.to(tl.float32), right_weight, column, size, eps)
    at = out + (2 * row + half) * size + column
    tl.store(at, x.to(out.dtype.element_ty), mask=inside)


@jit
def _rms_norm(x, weight, column, size, eps):
    """x [COLUMNS] float32, 0 from `size` on."""
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain
