"""Draft labels: each position's target token in the draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import IGNORE_INDEX


def draft_labels(t2d: Tensor, batch: Batch) -> Tensor:
    """Draft ids of a batch's tokens, `IGNORE_INDEX` where the draft vocabulary (t2d [V] bool) has
    none or the token is not counted: [B, L] int64."""
    to_draft = torch.where(t2d, t2d.cumsum(0) - 1, IGNORE_INDEX)
    return to_draft[batch.tokens.clamp(min=0)].where(batch.loss_mask, IGNORE_INDEX)
