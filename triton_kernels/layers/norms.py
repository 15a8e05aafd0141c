"""RMS norms with the sum before them, or beside another norm."""

from __future__ import annotations

from typing import Protocol

import torch

from ..op import cpu_op, op
from ..optional_triton import jit, next_power_of_2, tl


class Norm(Protocol):
    """An RMS norm over H that was given its epsilon; torch's own may lack one."""

    eps: float

    @property
    def weight(self) -> torch.Tensor: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def add_norm_triton(
    left: torch.Tensor,
    right: torch.Tensor,
    norm: Norm,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel, one program per entry; any strides will do."""
    if max(left.dim(), right.dim()) > 3 or not left.dtype == right.dtype == norm.weight.dtype:
        return add_norm.reference(left, right, norm, keep)
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
            left.stride(),
            right,
            right.stride(),
            keep,
            0 if keep is None else keep.stride(0),
            norm.weight,
            total,
            normed,
            size,
            norm.eps,
            PLACES=places,
            COLUMNS=columns,
            num_warps=4 if columns <= 2048 else 8,
        )
    return total, normed


@op(add_norm_triton)
def add_norm(
    left: torch.Tensor, right: torch.Tensor, norm: Norm, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum and its norm: (left[keep] + right, norm of it).

    Args:
        left: [T, ..., H].
        right: [Q, ..., H]; the two are broadcast.
        norm: over H.
        keep: [Q] int64, which rows of `left` are meant (then both have all their dimensions);
            None: all, and Q = T.
    """
    total = (left if keep is None else left[keep]) + right
    return total, norm(total)


@cpu_op
def norm_pair(
    left: torch.Tensor, right: torch.Tensor, left_norm: Norm, right_norm: Norm
) -> torch.Tensor:
    """Two tensors [..., H], each normed, side by side [..., 2H]; the norms have one epsilon."""
    return torch.cat([left_norm(left), right_norm(right)], dim=-1)


@jit(do_not_specialize=["keep_stride"])
def _add_norm_kernel(
    left_ptr,  # [T, PLACES, size]
    left_strides,
    right_ptr,  # [Q, PLACES, size]
    right_strides,
    keep_ptr,  # [Q]; or None
    keep_stride,
    weight_ptr,  # [size]
    total_ptr,  # [Q, PLACES, size] contiguous
    normed_ptr,  # [Q, PLACES, size] contiguous
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
    right_ptr += row * right_strides[0] + place * right_strides[1]
    if keep_ptr is not None:
        row = tl.load(keep_ptr + row * keep_stride).to(tl.int64)
    left_ptr += row * left_strides[0] + place * left_strides[1]
    x = tl.load(left_ptr + column * left_strides[2], mask=inside, other=0.0).to(tl.float32)
    x += tl.load(right_ptr + column * right_strides[2], mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    x = x.to(dtype)
    tl.store(total_ptr + entry * size + column, x, mask=inside)
    x = _rms_norm(x.to(tl.float32), weight_ptr, column, size, eps)
    tl.store(normed_ptr + entry * size + column, x.to(dtype), mask=inside)


@jit
def _rms_norm(x, weight, column, size, eps):
    """x [COLUMNS] float32, 0 from `size` on."""
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain
