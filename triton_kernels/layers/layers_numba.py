"""Norms and rotations of a drafter's decoder layer, for CPUs: one pass over each row.

The loops are in `layer_loops.py`. The few rows of a decode step cost less than torch's calls.
"""

from __future__ import annotations

import torch
from torch import nn

from ..optional_numba import takes
from .layer_loops import _norm_rows, _rotate

_SIZES = (torch.bfloat16, torch.float32)


def loops_take(where: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the loops take tensors of a dtype that lie where another does."""
    return dtype in _SIZES and takes(where) and not torch.is_autocast_enabled("cpu")


def runs_loop(*tensors: torch.Tensor) -> bool:
    """Whether the loops take tensors: of one dtype, on a CPU, without a gradient, each
    row's elements side by side."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    dtype = tensors[0].dtype
    alike = all(x.dtype == dtype and x.stride(-1) == 1 for x in tensors)
    return alike and loops_take(tensors[0], dtype)


def rms_norm_numba(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] contiguous, weight [H] -> [..., H]."""
    width, size = x.shape[-1], x.element_size()
    out = torch.empty_like(x)
    _norm_rows(
        x.data_ptr(),
        width * size,
        weight.data_ptr(),
        out.data_ptr(),
        width * size,
        x.numel() // width,
        width,
        size,
        eps,
    )
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
    if keep is not None and len(query) == len(key):
        query = query[keep]
    size, each = key.element_size(), key.shape[:-2].numel() // max(1, len(base))
    results = []
    for place, (x, kept) in enumerate(((query, keep), (key, None))):
        out = torch.empty(x.shape, dtype=x.dtype)
        entries = x.flatten(0, -3)
        norm = 0 if norms is None else norms[place].weight.data_ptr()
        _rotate(
            entries.data_ptr(),
            entries.stride(0) * size,
            entries.stride(1) * size,
            out.data_ptr(),
            *entries.shape,
            size,
            base.data_ptr(),
            base.stride(0),
            each,
            *_indices(kept),
            turn.data_ptr(),
            norm,
            0.0 if norms is None else norms[place].eps,
        )
        results.append(out)
    return results[0], results[1]


def _indices(index: torch.Tensor | None) -> tuple[int, int]:
    """Address and stride, in elements, of int64 numbers; 0, 0 without any."""
    return (0, 0) if index is None else (index.data_ptr(), index.stride(0))
