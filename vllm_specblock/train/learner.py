"""Learner: a drafter and its training loss in one module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.distributed import BatchCounts
from vllm_specblock.train.target.features import TargetOutputs, Teacher
from vllm_specblock.tree import DraftTree

IGNORE_INDEX = -1
"""Label of an ignored token: outside the draft vocabulary, in the prompt, in another document or
past the text's end."""


def draft_labels(t2d: Tensor, batch: Batch) -> Tensor:
    """Draft ids of a batch's tokens (t2d [V] bool: the draft vocabulary), else `IGNORE_INDEX`:
    [B, L] int64."""
    to_draft = torch.where(t2d, t2d.cumsum(0) - 1, IGNORE_INDEX)
    return to_draft[batch.tokens.clamp(min=0)].where(batch.loss_mask, IGNORE_INDEX)


@dataclass(frozen=True)
class TrainBatch:
    """Input of the learners for one batch.

    embed: target ids [...] int64 -> the target's own embeddings [..., Ht].
    step: updates done before this one.
    seed: seeds this batch's random choices; equal for all ranks and learners.
    counts: the learner's rows of the whole batch.
    """

    batch: Batch
    target_outputs: TargetOutputs
    embed: Callable[[Tensor], Tensor]
    step: int
    seed: int
    counts: BatchCounts = field(default_factory=BatchCounts)


class LossOutput(NamedTuple):
    """Loss and counts of one batch.

    loss: [] fp32, to be minimised; averaged over ranks it is the loss of the global batch.
    ce_loss, hits, seen: [M, K] fp32, no gradient, of this rank; M and K are the learner's own. Per
        block and position: summed cross-entropy; paths that are right at the position and before;
        paths that are right before it (hits / seen is α).
    rank_loss: [] fp32, no gradient; 0 for drafters without a rank head.
    num_positions: [M, K] positions that `ce_loss` sums over; None: `seen`.
    """

    loss: Tensor
    ce_loss: Tensor
    hits: Tensor
    seen: Tensor
    rank_loss: Tensor
    num_positions: Tensor | None = None


@dataclass(frozen=True)
class EvalSequence:
    """A text to draft along: tokens [T] int64, a prompt of `prompt` tokens and the target's own
    continuation, with the target's states hidden [T, 3·Ht] and last [T, Ht] (`TargetOutputs`)."""

    tokens: Tensor
    prompt: int
    hidden: Tensor
    last: Tensor
    embed: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, teacher: Teacher, batch: Batch, prompt: int) -> EvalSequence:
        """Return the text of a batch of one window."""
        outputs = teacher.teach(batch)
        return cls(batch.tokens[0], prompt, outputs.hidden[0], outputs.last[0], teacher.embed)


Draft = Callable[[int], DraftTree]
"""draft(root) -> the tree (R = 1) that serving would propose after committing tokens[0 .. root];
rows of `hidden` and `last` from `root` on are unknown. Called with ascending roots."""


class Learner(nn.Module, ABC):
    """A drafter in training; frozen parts of the target come with each `TrainBatch`."""

    @abstractmethod
    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """The loss of one batch."""

    @abstractmethod
    def draft_along(self, sequence: EvalSequence) -> Draft:
        """Draft along one text, as serving would, with fresh caches."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the checkpoint for an engine in bf16, replacing files atomically."""
