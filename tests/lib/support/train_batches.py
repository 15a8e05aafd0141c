"""Lessons of random numbers, for learners that need no target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_specblock.train.data.batch import NO_TOKEN, Batch
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.target.features import TargetOutputs


def packed(tokens: Tensor, loss_mask: Tensor, lengths: Sequence[Sequence[int]]) -> Batch:
    """Windows whose documents have the given lengths; tokens and counted [B, L]."""
    batch = Batch.of(tokens.clone(), loss_mask)
    for window, sizes in enumerate(lengths):
        column = 0
        for size in sizes:
            batch.position[window, column : column + size] = torch.arange(size)
            column += size
        batch.tokens[window, column:] = NO_TOKEN
        batch.position[window, column:] = 0
        batch.loss_mask[window, column:] = False
    return batch


def lesson_of(drafter, batch: Batch) -> TrainBatch:
    """A random target's features of `batch`, for a drafter with a `DrafterConfig`."""
    config, draw = drafter.config, torch.Generator().manual_seed(0)
    shape = batch.tokens.shape
    target_outputs = TargetOutputs(
        torch.randn(*shape, 3 * config.target_hidden_size, generator=draw),
        torch.randn(*shape, config.target_hidden_size, generator=draw),
        torch.randn(config.draft_vocab_size, config.target_hidden_size, generator=draw),
    )
    table = torch.randn(config.vocab_size, config.hidden_size, generator=draw)
    return TrainBatch(batch, target_outputs, lambda tokens: table[tokens], 0, 0)
