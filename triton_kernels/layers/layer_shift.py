"""Layer-wise shift between two decoder layers of the drafter (SpecBlock paper, section 3.1, eq. 3).

    out[t, k] = W [h[t, k]; h[t, k-1]],   h[t, -1] := h[t, 0]

Own position first, previous position second. The result replaces the hidden state, and the next
layer begins with its RMS norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..op import op
from ..optional_triton import cdiv, jit, tl


def layer_shift_triton(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel. hidden [T, K, H], weight [H, 2H] -> [T, K, H]."""
    hidden, weight = hidden.contiguous(), weight.contiguous()
    num_rows, block_len, size = hidden.shape
    out = torch.empty_like(hidden)
    num_entries = num_rows * block_len
    # A decode step has a few dozen entries and is bound by reading W: narrow column tiles keep
    # all SMs reading. Prompts are bound by arithmetic: square tiles.
    small = num_entries <= 128
    block_m = 16 if num_entries <= 16 else 32 if num_entries <= 32 else 64 if small else 128
    block_n = 32 if small else 128
    block_i = 32 if hidden.dtype == torch.float32 else 128 if small else 64
    _layer_shift_kernel[(cdiv(num_entries, block_m), cdiv(size, block_n))](
        hidden,
        weight,
        out,
        num_entries,
        size,
        K=block_len,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_I=block_i,
        num_warps=4 if small else 8,
        # Some 40 KB of W in flight, for full bandwidth.
        num_stages=3 if not small else 6 if block_m <= 32 else 4,
    )
    return out


@op(layer_shift_triton)
def shift(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return eq. 3 as printed. hidden [T, K, H], weight [H, 2H] -> [T, K, H]."""
    return F.linear(beside_previous(hidden), weight)


def beside_previous(hidden: torch.Tensor) -> torch.Tensor:
    """Return [h[t, k]; h[t, k-1]], the input of eq. 3. hidden [T, K, H] -> [T, K, 2H]."""
    previous = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
    return torch.cat([hidden, previous], dim=-1)


def layer_shift(
    hidden: torch.Tensor, linear: nn.Module, norm: nn.RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each block position with the one before it, and norm the result.

    Args:
        hidden: [T, K, H].
        linear: multiplies by W; another kind of layer than torch's has no gradient.
        norm: over H.

    Returns:
        the shifted state and its norm, both [T, K, H].
    """
    if isinstance(linear, nn.Linear):
        # The cast only matters under autocast: the kernel wants one dtype.
        shifted = shift(hidden, linear.weight.to(hidden.dtype))
    else:
        shifted = linear(beside_previous(hidden))
    return shifted, norm(shifted)


@jit(do_not_specialize=["num_entries"])
def _layer_shift_kernel(
    hidden_ptr,  # [T * K, H] contiguous
    weight_ptr,  # [H, 2H] contiguous
    out_ptr,  # [T * K, H] contiguous
    num_entries,
    size,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of the output.

    The two halves of W are two products into one accumulator, without the concatenation of eq. 3.
    """
    entry = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    entry_in = entry < num_entries
    column_in = column < size
    weight_row = weight_ptr + column.to(tl.int64)[None, :] * (2 * size)

    acc = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for half in tl.static_range(2):
        state = tl.where((half == 0) | (entry % K == 0), entry, entry - 1)
        state_row = hidden_ptr + state.to(tl.int64)[:, None] * size
        for start in range(0, size, BLOCK_I):
            inner = start + tl.arange(0, BLOCK_I)
            inner_in = inner < size
            states = tl.load(
                state_row + inner[None, :], mask=entry_in[:, None] & inner_in[None, :], other=0.0
            )
            weights = tl.load(
                weight_row + half * size + inner[:, None],
                mask=inner_in[:, None] & column_in[None, :],
                other=0.0,
            )
            # "tf32x3" keeps about float32's accuracy; it changes nothing for 16-bit inputs.
            acc = tl.dot(states, weights, acc, input_precision="tf32x3")

    at = out_ptr + entry.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=entry_in[:, None] & column_in[None, :])
