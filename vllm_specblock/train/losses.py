"""Losses of one block: eq. 6 and the rank loss, under the valid-prefix mask of eq. 5.

The mask is a list of rows still on their path, so the LM head runs only where a loss is counted:
about half of all positions. Logits are turned into gradients and discarded a few rows at a time, to
save memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.learner import IGNORE_INDEX

RANK_BUCKETS = (1, 4, 10)
"""Highest rank of buckets 0, 1 and 2; bucket 3 is the rest (section 3.2)."""


@dataclass(frozen=True)
class BlockLoss:
    """Sums over one block of T rows.

    draft: [K] fp32 nats, cross-entropy over each position's `num_positions` [K] counted rows.
    rank: [] fp32, rank loss over all counted positions; 0 without it.
    on_path: [T, K] bool, the mask m of eq. 5: all earlier positions were right.
    hit: [T, K] bool, on the path and the drafter's first choice is the label.
    """

    draft: Tensor
    rank: Tensor
    num_positions: Tensor
    on_path: Tensor
    hit: Tensor


def block_loss(
    drafter: SpecBlockModel,
    hidden: Tensor,
    label: Tensor,
    target_probs: Tensor,
    target_row: Tensor,
    start: Tensor,
    rank: bool,
    valid_prefix: bool = True,
    rejected_only: bool = False,
) -> BlockLoss:
    """Return the losses of one block at T rows.

    Args:
        hidden: [T, K, H], the block's last-layer states before the final norm.
        label: [T, K] int64 draft ids of the tokens y*, or `IGNORE_INDEX`, before which the path
            ends.
        target_probs: [P, Vd] fp32, p* over the draft vocabulary after each of P text positions.
        target_row: [T, K] int64, row of `target_probs` with p* at each position.
        start: [T] bool, m at position 1.
        rank: compute the rank loss, whose gradient stays in the rank head.
        valid_prefix: False (ablation of Table 2): count rows after a wrong choice, too.
        rejected_only: count only the wrong choice of each path (Online Speculative Decoding).
    """
    head = drafter.lm_head.weight.to(hidden.dtype)  # one cast for all positions

    def losses_at(rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Summed cross-entropy [], summed rank loss [], and first choice is the label [n]."""
        wanted = label[rows, k]
        correct, buckets, features = torch.empty_like(wanted, dtype=torch.bool), [], []

        def look(some: slice, logits: Tensor) -> None:
            correct[some] = logits.argmax(-1) == wanted[some]
            if rank:
                buckets.append(rank_bucket(logits, wanted[some]))
                features.append(drafter.rank_features(logits))

        normed = drafter.norm(hidden[rows, k])
        loss, _ = head_loss(normed, head, target_probs, target_row[rows, k], look)
        rank_loss = torch.zeros_like(loss)
        if rank and buckets:
            rank_logits = drafter.rank(normed, torch.cat(features)).float()
            rank_loss = cross_entropy(rank_logits, torch.cat(buckets), reduction="sum")
        return loss, rank_loss, correct

    rows = start.nonzero()[:, 0]
    right = start.clone()  # rows without a wrong choice so far
    on_path, hit = torch.zeros_like(label).bool(), torch.zeros_like(label).bool()
    draft, num_positions = [], []
    rank_sum = hidden.new_zeros((), dtype=torch.float32)
    for k in range(label.shape[1]):
        rows = rows[label[rows, k] != IGNORE_INDEX]
        counted = rows
        if rejected_only:
            with torch.no_grad():
                choice = drafter.lm_head(drafter.norm(hidden[rows, k])).argmax(-1)
            correct = choice == label[rows, k]
            counted = rows[~correct]
        loss, rank_loss, right_here = losses_at(counted, k)
        if not rejected_only:
            correct = right_here
        draft.append(loss)
        num_positions.append(len(counted))
        rank_sum = rank_sum + rank_loss
        on_path[rows, k] = right[rows]
        hit[rows, k] = right[rows] & correct
        right = torch.zeros_like(right).index_put((rows,), hit[rows, k])
        if valid_prefix:
            rows = rows[correct]
    return BlockLoss(
        torch.stack(draft), rank_sum, torch.tensor(num_positions, device=label.device), on_path, hit
    )


def rank_bucket(logits: Tensor, label: Tensor) -> Tensor:
    """Bucket 0..3 of each label's rank (1 = most likely) in logits [n, Vd]; label [n] -> [n]."""
    rank = 1 + (logits > logits.gather(-1, label[:, None])).sum(-1)
    return torch.stack([rank > highest for highest in RANK_BUCKETS]).sum(0)


ROWS, GPU_ROWS = 256, 4096
"""Rows at a time: 8 MB of float32 logits at a draft vocabulary of 8192; 512 MB at 32,000."""

Look = Callable[[slice, Tensor], None]
"""look(rows, logits [n, Vd] fp32): called with the logits of some rows before they are freed."""


def head_loss(
    normed: Tensor, head: Tensor, target_probs: Tensor, target_row: Tensor, look: Look
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of draft logits normed [n, H] · head [Vd, H] (of one dtype) against
    rows target_row [n] int64 of target_probs [P, Vd] fp32, which sum to 1: its sum [] fp32, and
    each row's [n] fp32, without a gradient."""
    apply: Any = _HeadLoss.apply  # untyped in torch
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
