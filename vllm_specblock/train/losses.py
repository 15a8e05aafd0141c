"""The losses of one block: eq. 6 and the rank loss, both under the valid-prefix mask of eq. 5.

The mask is kept as the list of rows that are still on their path. It shrinks from position to
position, so the LM head runs only where a loss is counted: about half of all positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vllm_specblock.draft.model import SpecBlockDrafter

OUTSIDE = -1
"""Label of a position whose token the drafter cannot name, or that lies past the text's end."""

RANK_BUCKETS = (1, 4, 10)
"""Highest rank of buckets 0, 1 and 2; bucket 3 is the rest (section 3.2)."""


@dataclass(frozen=True)
class BlockLoss:
    """What one block of T rows gave.

    draft: [K] fp32, the loss of each position k (eq. 6), nats; 0 where no row is on its path.
    rank: [] fp32, mean cross-entropy of the rank buckets; 0 where it is switched off.
    nats: [K] fp32, without gradient, the cross-entropy summed over the rows on their path.
    on_path: [T, K] bool, the mask m of eq. 5.
    hit: [T, K] bool, on the path and the drafter's first choice is the label.
    """

    draft: Tensor
    rank: Tensor
    nats: Tensor
    on_path: Tensor
    hit: Tensor


def block_loss(
    drafter: SpecBlockDrafter,
    hidden: Tensor,
    label: Tensor,
    law: Tensor,
    law_row: Tensor,
    start: Tensor,
    rank: bool,
    least: float = 0.0,
) -> BlockLoss:
    """Losses of one block at T rows.

    Args:
        drafter: gives the heads.
        hidden: [T, K, H], the block's last-layer states before the final norm.
        label: [T, K] int64 draft ids of the tokens y*, or `OUTSIDE`. A path ends before an
            outside label: the position itself is not counted either.
        law: [P, Vd] fp32, p* over the draft vocabulary after each of P text positions.
        law_row: [T, K] int64, which row of `law` is p* at each position.
        start: [T] bool, m at position 1.
        rank: count the rank loss. Its gradient stays in the rank head.
        least: rows that N_k of eq. 6 is taken as at the least. With 0, while paths are still
            short, the mean of a handful of rows weighs as much as that of all rows, and its
            noise drowns the first position.
    """
    on_path, hit = torch.zeros_like(label, dtype=torch.bool), torch.zeros_like(label).bool()
    zero = hidden.new_zeros((), dtype=torch.float32)
    draft, nats = [zero] * label.shape[1], [zero] * label.shape[1]
    bucket_loss, bucket_count = zero, 0
    rows = start.nonzero()[:, 0]
    for k in range(label.shape[1]):
        rows = rows[label[rows, k] != OUTSIDE]
        if not len(rows):
            break
        on_path[rows, k] = True
        wanted = label[rows, k]
        if rank:
            logits, rank_logits = drafter.heads(hidden[rows, k])
        else:  # spares the top-k of the rank features
            logits = drafter.lm_head(drafter.norm(hidden[rows, k]))
        logits = logits.float()
        # -sum p* log p, with sum p* = 1.
        loss = (logits.logsumexp(-1) - (law[law_row[rows, k]] * logits).sum(-1)).sum()
        draft[k], nats[k] = loss / max(len(rows), least), loss.detach()
        if rank:
            bucket = rank_bucket(logits.detach(), wanted)
            bucket_loss = bucket_loss + cross_entropy(rank_logits.float(), bucket, reduction="sum")
            bucket_count += len(rows)
        rows = rows[logits.argmax(-1) == wanted]
        hit[rows, k] = True
    return BlockLoss(
        draft=torch.stack(draft),
        rank=bucket_loss / max(1, bucket_count),
        nats=torch.stack(nats),
        on_path=on_path,
        hit=hit,
    )


def rank_bucket(logits: Tensor, label: Tensor) -> Tensor:
    """Bucket 0..3 of each label's rank (1 = most likely) in logits [n, Vd]; label [n] -> [n]."""
    rank = 1 + (logits > logits.gather(-1, label[:, None])).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANK_BUCKETS, device=rank.device))
