"""The cross-entropy of eq. 6 without logits that outlive it: a few rows at a time, with gradients.

Left to autograd, a batch's logits are read and written a dozen times by tensors far larger than any
cache, which without a GPU takes longer than the products. Here some rows' logits are made, read and
turned into gradients while they are near, and only sums stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 256
"""Rows at a time: 8 MB of float32 logits at a draft vocabulary of 8192."""

Look = Callable[[slice, Tensor], None]
"""look(rows, logits [n, Vd] fp32): reads what else is wanted of these rows' logits."""


def head_loss(normed: Tensor, weight: Tensor, law: Tensor, law_row: Tensor, look: Look) -> Tensor:
    """Cross-entropy of the draft logits against p*, summed over rows, [] fp32.

    Args:
        normed: [n, H], what the LM head reads.
        weight: [Vd, H] fp32, the LM head; the product is in the dtype of `normed`.
        law: [P, Vd] fp32, rows that sum to 1; law_row: [n] int64, each row's.
        look: called with all rows, some at a time.
    """
    return _HeadLoss.apply(normed, weight, law, law_row, look, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, normed, weight, law, law_row, look, learns):
        head = weight.to(normed.dtype)
        # In the dtype that autograd would give the products.
        of_logits = normed.new_empty(len(normed) if learns else 0, len(head))
        loss = torch.zeros((), dtype=torch.float32, device=normed.device)
        for first in range(0, len(normed), ROWS):
            here = slice(first, min(first + ROWS, len(normed)))
            logits = (normed[here] @ head.T).float()
            look(here, logits)
            true = law[law_row[here]]
            # -sum p* log p, with sum p* = 1; its gradient is p - p*.
            most = logits.amax(-1, keepdim=True)
            loss -= (true * logits).sum()
            wrong = logits.sub_(most).exp_()
            total = wrong.sum(-1, keepdim=True)
            loss += (total.log() + most).sum()
            if learns:
                of_logits[here] = wrong.div_(total).sub_(true)
        if learns:
            ctx.save_for_backward(of_logits @ head, of_logits.T @ normed)
        return loss

    @staticmethod
    def backward(ctx, scale):
        of_normed, of_weight = ctx.saved_tensors
        return of_normed * scale, (of_weight * scale).float(), None, None, None, None
