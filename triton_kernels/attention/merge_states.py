"""Merge of two attention states over disjoint KV sets."""

from __future__ import annotations

import torch

from ..optional_triton import cdiv, jit, next_power_of_2, tl


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Join two attention states.

    Args (T queries, nh heads), all with any strides:
        out_a, out_b: [T, nh, D], attention over each set.
        lse_a, lse_b: [T, nh] fp32, natural logarithm of the sum of the exponentials of its
            scores. −inf, or +inf as FlashAttention writes it, where a set has no entry: then
            that state's `out` counts for nothing, even if it is NaN.
        out: [T, nh, D] to write into; may be out_a or out_b.

    Returns:
        `out`: zeros where both sets are empty.
    """
    merge = merge_states_triton if out.is_cuda else merge_states_reference
    return merge(out_a, lse_a, out_b, lse_b, out)


def merge_states_reference(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Arguments as in `merge_states`."""
    lse = torch.stack([lse_a, lse_b]).float()
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    weight = torch.nan_to_num(lse.softmax(0))[..., None]  # both empty: 0 for each
    states = torch.stack([out_a, out_b]).float()
    return out.copy_((weight * states.masked_fill(weight == 0, 0)).sum(0))


def merge_states_triton(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel; arguments as in `merge_states`."""
    num_tokens, num_heads, head_size = out.shape
    block_m = 16
    _merge_states_kernel[(cdiv(num_tokens * num_heads, block_m),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        num_tokens * num_heads,
        num_heads,
        *out_a.stride(),
        *lse_a.stride(),
        *out_b.stride(),
        *lse_b.stride(),
        *out.stride(),
        HEAD=head_size,
        BLOCK_M=block_m,
        BLOCK_D=next_power_of_2(head_size),
        num_warps=4,
    )
    return out


@jit(do_not_specialize=["num_rows"])
def _merge_states_kernel(
    out_a,  # [T, nh, D]
    lse_a,  # [T, nh] fp32
    out_b,  # [T, nh, D]
    lse_b,  # [T, nh] fp32
    out,  # [T, nh, D]
    num_rows,  # T · nh
    num_heads,
    a_token_stride,
    a_head_stride,
    a_dim_stride,
    lse_a_token_stride,
    lse_a_head_stride,
    b_token_stride,
    b_head_stride,
    b_dim_stride,
    lse_b_token_stride,
    lse_b_head_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    HEAD: tl.constexpr,  # D
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M (token, head) rows."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < num_rows
    token = (row // num_heads).to(tl.int64)
    head = row % num_heads
    dim = tl.arange(0, BLOCK_D)
    none = float("-inf")
    a = tl.load(
        lse_a + token * lse_a_token_stride + head * lse_a_head_stride, mask=row_in, other=none
    )
    b = tl.load(
        lse_b + token * lse_b_token_stride + head * lse_b_head_stride, mask=row_in, other=none
    )
    a = tl.where(a == float("inf"), none, a)
    b = tl.where(b == float("inf"), none, b)
    top = tl.maximum(a, b)
    top = tl.where(top == none, 0.0, top)  # -inf - -inf is NaN
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    total = tl.where(total > 0, total, 1.0)
    dim_in = (dim < HEAD)[None, :]
    # A state without entries is not even read: it may be NaN.
    state_a = tl.load(
        (out_a + token * a_token_stride + head * a_head_stride)[:, None]
        + dim[None, :] * a_dim_stride,
        mask=(row_in & (weight_a > 0))[:, None] & dim_in,
        other=0.0,
    ).to(tl.float32)
    state_b = tl.load(
        (out_b + token * b_token_stride + head * b_head_stride)[:, None]
        + dim[None, :] * b_dim_stride,
        mask=(row_in & (weight_b > 0))[:, None] & dim_in,
        other=0.0,
    ).to(tl.float32)
    merged = state_a * (weight_a / total)[:, None] + state_b * (weight_b / total)[:, None]
    tl.store(
        (out + token * out_token_stride + head * out_head_stride)[:, None]
        + dim[None, :] * out_dim_stride,
        merged.to(out.dtype.element_ty),
        mask=row_in[:, None] & dim_in,
    )
