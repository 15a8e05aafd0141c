"""What the trainer trains: a drafter together with its objective.

One module for both, whose `forward` is the loss of one batch: that is the unit which data
parallelism and sharding wrap, and what lets several drafters learn side by side from one pass
over the frozen target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.distributed import BatchCounts, mean_over_ranks
from vllm_specblock.train.target.features import TargetOutputs
from vllm_specblock.tree import DraftTree

IGNORE_INDEX = -1
"""Label of a position whose token is not to be learned: the drafter cannot name it, or it lies
in the prompt, in another document or past the text's end."""


@dataclass(frozen=True)
class TrainBatch:
    """What every drafter is told for one batch.

    Attributes:
        batch: the text, on the device.
        target_outputs: the target's features of it.
        embed: target ids [...] int64 -> the target's own embeddings [..., Ht].
        step: updates done before this one.
        seed: of this batch's random choices; equal on every rank, and for every learner.
        counts: the learner's rows of the whole batch, where this is only a part of a rank's share.
    """

    batch: Batch
    target_outputs: TargetOutputs
    embed: Callable[[Tensor], Tensor]
    step: int
    seed: int
    counts: BatchCounts | None = None

    def draws(self) -> torch.Generator:
        """A fresh generator on the CPU for this batch's choices."""
        return torch.Generator().manual_seed(self.seed)

    def mean(self, total: Tensor, count: Tensor, floor: float = 0.0) -> Tensor:
        """This batch's share of means over all rows of the batch, whichever rank and micro-batch
        they are in; arguments and result as `mean_over_ranks` has them."""
        if self.counts is None:
            return mean_over_ranks(total, count, floor)
        return self.counts.mean(total, count, floor)


class LossOutput(NamedTuple):
    """What one batch gave.

    loss: [] fp32, to be minimised; averaged over ranks it is the loss of the global batch.
    ce_loss, hits, seen: [M, K] fp32, no gradient, of this rank; M and K are the learner's own. Per
        block and position: summed cross-entropy; how many paths were right up to the position
        before, and how many of them at the position too (hits / seen is α).
    rank_loss: [] fp32, no gradient; 0 for drafters without a rank head.
    num_positions: [M, K] positions that `ce_loss` sums over, if others than those in `seen`.
    """

    loss: Tensor
    ce_loss: Tensor
    hits: Tensor
    seen: Tensor
    rank_loss: Tensor
    num_positions: Tensor | None = None


@dataclass(frozen=True)
class EvalSequence:
    """A text to draft along, and what the target's forward over it gave.

    Attributes:
        tokens: [T] int64, a prompt and the target's own continuation.
        prompt: tokens of the prompt.
        hidden: [T, 3·Ht], residual stream after the three feature layers.
        last: [T, Ht], what the target's LM head reads (after the final norm).
        embed: target ids [...] int64 -> the target's own embeddings [..., Ht].
    """

    tokens: Tensor
    prompt: int
    hidden: Tensor
    last: Tensor
    embed: Callable[[Tensor], Tensor]


Draft = Callable[[int], DraftTree]
"""draft(root) -> the tree (R = 1) that serving would propose when tokens[0 .. root] of the sequence
are committed and the target has run on tokens[0 .. root − 1]: rows of `hidden` and `last` from
`root` on are not known yet. Called with ascending roots."""


class Learner(nn.Module, ABC):
    """A drafter that learns.

    Its parameters are what is optimised. Frozen pieces of the target are not among them: they
    come with each `TrainBatch`.
    """

    @abstractmethod
    def forward(self, train_batch: TrainBatch) -> LossOutput:
        """The loss of one batch."""

    def rate_of(self, name: str) -> float:
        """Learning rate of the parameter called `name`, as a multiple of everybody's."""
        return 1.0

    @abstractmethod
    def draft_along(self, sequence: EvalSequence) -> Draft:
        """Draft along one text, as serving would, with fresh caches."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what an engine loads, bf16; files that are there already are replaced whole."""
