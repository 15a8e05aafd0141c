"""The cross-entropy of eq. 6 without logits that outlive it: a few rows at a time, with gradients.

Left to autograd, a batch's logits are read and written a dozen times by tensors far larger than any
cache, which without a GPU takes longer than the products. Here some rows' logits are made, read and
turned into gradients while they are near, and only sums stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

ROWS = 256
"""Rows at a time: 8 MB of float32 logits at a draft vocabulary of 8192."""

Look = Callable[[slice, Tensor], None]
"""look(rows, logits [n, Vd] fp32): reads what else is wanted of these rows' logits."""


def head_loss(
    normed: Tensor, head: Tensor, target_probs: Tensor, target_row: Tensor, look: Look
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the draft logits against p*.

    Args:
        normed: [n, H], what the LM head reads.
        head: [Vd, H], the LM head, in the dtype of `normed`.
        target_probs: [P, Vd] fp32, rows that sum to 1; target_row: [n] int64, each row's.
        look: called with all rows, some at a time.

    Returns:
        its sum [] fp32, and each row's [n] fp32, without a gradient.
    """
    apply: Any = _HeadLoss.apply  # torch has not typed it
    return apply(normed, head, target_probs, target_row, look, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        normed: Tensor,
        head: Tensor,
        target_probs: Tensor,
        target_row: Tensor,
        look: Look,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        # In the dtype that autograd would give the products.
        of_logits = normed.new_empty(len(normed) if learns else 0, len(head))
        ce_loss = torch.empty(len(normed), dtype=torch.float32, device=normed.device)
        for first in range(0, len(normed), ROWS):
            here = slice(first, min(first + ROWS, len(normed)))
            logits = (normed[here] @ head.T).float()
            look(here, logits)
            true = target_probs[target_row[here]]
            # -sum p* log p, with sum p* = 1; its gradient is p - p*.
            most = logits.amax(-1, keepdim=True)
            ce_loss[here] = -(true * logits).sum(-1)
            wrong = logits.sub_(most).exp_()
            total = wrong.sum(-1, keepdim=True)
            ce_loss[here] += (total.log() + most)[:, 0]
            if learns:
                of_logits[here] = wrong.div_(total).sub_(true)
        if learns:
            ctx.save_for_backward(of_logits @ head, of_logits.T @ normed)
        ctx.mark_non_differentiable(ce_loss)
        return ce_loss.sum(), ce_loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_normed, of_weight = ctx.saved_tensors
        return of_normed * scale, of_weight * scale, None, None, None, None
