"""The cross-entropy of eq. 6, a few rows of logits at a time, with gradients.

The logits of some rows are turned into gradients at once and discarded: a batch's never lie in
memory together. On a CPU they fit into its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

ROWS, GPU_ROWS = 256, 4096
"""Rows at a time: 8 MB of float32 logits at a draft vocabulary of 8192; 512 MB at 32,000."""

Look = Callable[[slice, Tensor], None]
"""look(rows, logits [n, Vd] fp32): reads the logits of some rows before they are discarded."""


def head_loss(
    normed: Tensor, head: Tensor, target_probs: Tensor, target_row: Tensor, look: Look
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the draft logits normed [n, H] · head [Vd, H] (of one dtype) against rows
    target_row [n] int64 of target_probs [P, Vd] fp32, which sum to 1.

    Returns:
        its sum [] fp32, and each row's [n] fp32, without a gradient.
    """
    apply: Any = _HeadLoss.apply  # torch does not type it
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
        of_logits = normed.new_empty(len(normed) if learns else 0, len(head))
        ce_loss = torch.empty(len(normed), dtype=torch.float32, device=normed.device)
        rows = GPU_ROWS if normed.is_cuda else ROWS
        for first in range(0, len(normed), rows):
            here = slice(first, min(first + rows, len(normed)))
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
