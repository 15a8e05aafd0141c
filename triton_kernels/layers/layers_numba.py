"""Norms, sums and rotations of a drafter's decoder layer, for CPUs: one pass over each row.

The loops are in `layer_loops.py`. The few rows of a decode step cost less than torch's calls.
"""

from __future__ import annotations

import torch
from torch import nn

from ..optional_numba import takes
from .layer_loops import _add_norm, _beside_previous, _gather_rows, _norm_rows, _rotate
from .layer_shift import beside_previous
from .norms import Norm, add_norm, norm_pair

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


def add_norm_numba(
    left: torch.Tensor,
    right: torch.Tensor,
    norm: Norm,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `norms.add_norm` has them; other dtypes and dimensions are left to torch."""
    if max(left.dim(), right.dim()) > 3 or not runs_loop(left, right, norm.weight):
        return add_norm.reference(left, right, norm, keep)
    if keep is None:
        left, right = torch.broadcast_tensors(left, right)
    total, normed = (torch.empty(right.shape, dtype=right.dtype) for _ in range(2))
    left, right = (x[:, None] if x.dim() == 2 else x for x in (left, right))
    size = right.element_size()
    _add_norm(
        left.data_ptr(),
        left.stride(0) * size,
        left.stride(1) * size,
        right.data_ptr(),
        right.stride(0) * size,
        right.stride(1) * size,
        *_indices(keep),
        norm.weight.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        right.shape[0],
        right.shape[1],
        right.shape[2],
        size,
        norm.eps,
    )
    return total, normed


def norm_pair_numba(
    left: torch.Tensor,
    right: torch.Tensor,
    left_norm: Norm,
    right_norm: Norm,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments as `norms.norm_pair` has them; other dtypes are left to torch."""
    left = left if rows is None else left[rows]
    if not runs_loop(left, right, left_norm.weight, right_norm.weight):
        return norm_pair.reference(left, right, left_norm, right_norm)
    width, size = left.shape[-1], left.element_size()
    out = torch.empty(*left.shape[:-1], 2 * width, dtype=left.dtype)
    for place, (x, norm) in enumerate(((left, left_norm), (right, right_norm))):
        rows = x.flatten(0, -2)
        _norm_rows(
            rows.data_ptr(),
            rows.stride(0) * size,
            norm.weight.data_ptr(),
            out.data_ptr() + place * width * size,
            2 * width * size,
            len(rows),
            width,
            size,
            norm.eps,
        )
    return out


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


def beside_previous_numba(hidden: torch.Tensor) -> torch.Tensor:
    """Arguments as `layer_shift.beside_previous` has them."""
    if not (runs_loop(hidden) and hidden.is_contiguous()):
        return beside_previous.reference(hidden)
    rows, places, width = hidden.shape
    out = hidden.new_empty(rows, places, 2 * width)
    _beside_previous(hidden.data_ptr(), out.data_ptr(), rows, places, width * hidden.element_size())
    return out


def gather_states_numba(states: list[torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """States L × [B, H] and source [T] int64 -> [T, L · H], rows of all layers side by side."""
    width, size = states[0].shape[1], states[0].element_size()
    out = states[0].new_empty(len(source), len(states) * width)
    for layer, state in enumerate(states):
        _gather_rows(
            state.data_ptr(),
            state.stride(0) * size,
            *_indices(source),
            out.data_ptr() + layer * width * size,
            out.shape[1] * size,
            len(source),
            width * size,
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
