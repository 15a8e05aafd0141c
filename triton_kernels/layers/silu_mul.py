"""silu(gate) · up of a product that holds both side by side, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..optional_triton import cdiv, jit, tl

_COLUMNS = 1024  # of a program


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """both [..., 2I], gate first -> [..., I]. CUDA tensors go to the kernel; no gradient."""
    return (silu_mul_triton if both.is_cuda else silu_mul_reference)(both)


def silu_mul_reference(both: torch.Tensor) -> torch.Tensor:
    """Argument as in `silu_mul`, whose gate is overwritten."""
    inner = both.shape[-1] // 2
    gate, up = both[..., :inner], both[..., inner:]
    # In place: of a prompt these are the largest tensors by far.
    return F.silu(gate, inplace=True).mul_(up)


def silu_mul_triton(both: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; argument as in `silu_mul`, contiguous in its last dimension."""
    inner = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], inner, dtype=both.dtype, device=both.device)
    rows = both.flatten(0, -2)
    if len(rows):
        _silu_mul_kernel[(len(rows), cdiv(inner, _COLUMNS))](
            rows, rows.stride(0), out, inner, COLUMNS=_COLUMNS, num_warps=4
        )
    return out


@jit
def _silu_mul_kernel(
    both,  # [rows, 2 inner]
    row_stride,
    out,  # [rows, inner] contiguous
    inner,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    at = both + row * row_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the product, as torch does it: a drafter was trained with that.
    dtype: tl.constexpr = out.dtype.element_ty
    gate = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * inner + column, (gate * up).to(dtype), mask=inside)
