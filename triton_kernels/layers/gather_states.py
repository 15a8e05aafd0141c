"""Rows of several layers' hidden states side by side, as one launch for eight layers.

The torch reference is `CommittedTokens.features`: a launch for each layer, and one to join them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..optional_triton import cdiv, jit, tl

_LAYERS = 8  # pointers of one launch
_COLUMNS = 1024  # of a program


def gather_states_triton(states: Sequence[torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """Launch the kernel.

    Args:
        states: L × [B, H] of one dtype.
        source: [T] int64, the row of each state to take.

    Returns:
        [T, L · H], contiguous.
    """
    first, rows = states[0], len(source)
    size, stride = first.shape[1], first.stride(0)
    if any(x.stride() != (stride, 1) for x in states):
        states = [x.contiguous() for x in states]
        stride = size
    out = torch.empty(rows, len(states) * size, dtype=first.dtype, device=first.device)
    for start in range(0, len(states) if rows else 0, _LAYERS):
        some = states[start : start + _LAYERS]
        _gather_states_kernel[(rows, cdiv(size, _COLUMNS))](
            *some,
            *[first] * (_LAYERS - len(some)),
            stride,
            source,
            source.stride(0),
            out,
            start * size,
            out.stride(0),
            SIZE=size,
            LAYERS=len(some),
            BLOCK=_COLUMNS,
            num_warps=4,
        )
    return out


# Slices of a batch begin anywhere, which is not to be compiled for.
@jit(do_not_specialize=["source"])
def _gather_states_kernel(
    state0,  # LAYERS of them; [B, SIZE]
    state1,  # LAYERS of them; [B, SIZE]
    state2,  # LAYERS of them; [B, SIZE]
    state3,  # LAYERS of them; [B, SIZE]
    state4,  # LAYERS of them; [B, SIZE]
    state5,  # LAYERS of them; [B, SIZE]
    state6,  # LAYERS of them; [B, SIZE]
    state7,  # LAYERS of them; [B, SIZE]
    stride,
    source,  # [T] int64
    source_stride,
    out,  # [T, all layers · SIZE]
    first_column,
    out_stride,
    SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of every layer, of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.load(source + row * source_stride) * stride + column
    to = out + row * out_stride + first_column + column
    tl.store(to, tl.load(state0 + at, mask=inside), mask=inside)
    if LAYERS > 1:
        tl.store(to + SIZE, tl.load(state1 + at, mask=inside), mask=inside)
    if LAYERS > 2:
        tl.store(to + 2 * SIZE, tl.load(state2 + at, mask=inside), mask=inside)
    if LAYERS > 3:
        tl.store(to + 3 * SIZE, tl.load(state3 + at, mask=inside), mask=inside)
    if LAYERS > 4:
        tl.store(to + 4 * SIZE, tl.load(state4 + at, mask=inside), mask=inside)
    if LAYERS > 5:
        tl.store(to + 5 * SIZE, tl.load(state5 + at, mask=inside), mask=inside)
    if LAYERS > 6:
        tl.store(to + 6 * SIZE, tl.load(state6 + at, mask=inside), mask=inside)
    if LAYERS > 7:
        tl.store(to + 7 * SIZE, tl.load(state7 + at, mask=inside), mask=inside)
