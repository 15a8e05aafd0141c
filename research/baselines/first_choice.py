"""Losses of a LM head with the first choices that go with them."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.train.head_loss import head_loss


def loss_and_choice(
    normed: Tensor, head: Tensor, target_probs: Tensor, target_row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_loss`, and the drafter's first choice.

    Arguments as there; `head` may have another dtype.

    Returns:
        sum [] fp32, rows' losses [n] fp32 without a gradient, draft ids [n] int64.
    """
    best = torch.empty_like(target_row)

    def look(rows: slice, logits: Tensor) -> None:
        best[rows] = logits.argmax(-1)

    return *head_loss(normed, head.to(normed.dtype), target_probs, target_row, look), best
