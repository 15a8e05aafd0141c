"""GPU clock for spans, also inside CUDA graphs; without a torch reference."""

from __future__ import annotations

import torch

from ..optional_triton import jit, tl


@jit
def _begin_kernel(total_ptr):
    tl.store(total_ptr + 2, tl.extra.cuda.globaltimer())


@jit
def _end_kernel(total_ptr):
    took = tl.extra.cuda.globaltimer() - tl.load(total_ptr + 2)
    tl.store(total_ptr, tl.load(total_ptr) + took)
    tl.store(total_ptr + 1, tl.load(total_ptr + 1) + 1)


def begin_span_triton(total: torch.Tensor) -> None:
    """Record the time when the queued work is done.

    total: [3] int64 on a GPU: nanoseconds of all spans, their number, and the last start.
    """
    _begin_kernel[(1,)](total, num_warps=1)


def end_span_triton(total: torch.Tensor) -> None:
    """Add the time since `begin_span_triton`; `total` as there."""
    _end_kernel[(1,)](total, num_warps=1)
