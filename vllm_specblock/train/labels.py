"""Which token each position should predict, in the numbering of the draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.train.learner import OUTSIDE
from vllm_specblock.train.text.batch import Batch


def draft_labels(t2d: Tensor, batch: Batch) -> Tensor:
    """Draft ids of a batch's tokens, `OUTSIDE` where the draft vocabulary (t2d [V] bool) has
    none or the token is not counted: [B, L] int64."""
    to_draft = torch.where(t2d, t2d.cumsum(0) - 1, OUTSIDE)
    return to_draft[batch.tokens.clamp(min=0)].where(batch.counted, OUTSIDE)
