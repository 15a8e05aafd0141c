"""Small lessons for baselines; a lesson's loss and decoder layers in plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from support.records import DRAFT_VOCAB, HIDDEN, NAMED, VOCAB
from support.train_batches import packed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import EvalSequence, LossOutput, TrainBatch
from vllm_specblock.train.target.features import TargetOutputs

TARGET_CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
"""Sizes of a small model that drafts by itself."""


def vocabulary() -> tuple[Tensor, Tensor, list[int]]:
    """d2t, t2d, and the target ids that the drafter can name."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[NAMED] = True
    return NAMED - torch.arange(DRAFT_VOCAB), t2d, NAMED.tolist()


def packed_lesson() -> TrainBatch:
    """Three windows of 18 columns with random tokens, of which most count, features and laws."""
    torch.manual_seed(0)
    tokens, loss_mask = torch.randint(VOCAB, (3, 18)), torch.rand(3, 18) < 0.85
    return lesson_of(packed(tokens, loss_mask, [[9, 7], [3, 1, 6], [15, 3]]))


def lesson_of(batch: Batch) -> TrainBatch:
    """Random features and laws for a batch."""
    shape = batch.tokens.shape
    target_outputs = TargetOutputs(
        torch.randn(*shape, 3 * HIDDEN),
        torch.randn(*shape, HIDDEN),
        torch.randn(DRAFT_VOCAB, HIDDEN),
    )
    return TrainBatch(batch, target_outputs, embed, 0, 0)


def embed(tokens: Tensor) -> Tensor:
    """The target's embeddings [..., HIDDEN] of target ids [...]."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))[tokens]


def script_to(train_batch: TrainBatch, root: int) -> EvalSequence:
    """The first window's text up to `root`; what the target has not run on is not a number."""
    target_outputs = train_batch.target_outputs
    hidden, last = (x[0, : root + 1].clone() for x in (target_outputs.hidden, target_outputs.last))
    hidden[root], last[root] = math.nan, math.nan
    return EvalSequence(train_batch.batch.tokens[0, : root + 1], 1, hidden, last, embed)


Rows = Callable[[int, int, int], Sequence[Tensor]]
"""rows(window, first column of the row's document, column) -> log-probabilities [Vd] of each
position of that row."""


def assert_outcome(
    outcome: LossOutput, rows: Rows, train_batch: TrainBatch, weights: Sequence[float], blocks: int
) -> None:
    """The loss and tally are those of one document, row and position at a time, in `blocks`."""
    named = vocabulary()[2]
    batch, count = train_batch.batch, len(weights)
    losses: list[list[float]] = [[] for _ in weights]
    ce_loss, hits, seen = ([0.0] * count for _ in range(3))
    for window, root in (batch.loss_mask & (batch.position > 0)).nonzero().tolist():
        tokens, loss_mask = batch.tokens[window].tolist(), batch.loss_mask[window].tolist()
        begin, column, right = root - int(batch.position[window, root]), root - 1, True
        end = begin + int((batch.document[window] == batch.document[window, root]).sum())
        for k, logprob in enumerate(rows(window, begin, column)):
            place = column + 2 + k
            if place >= end or not loss_mask[place] or tokens[place] not in named:
                right = False
                continue
            target_probs = train_batch.target_outputs.target_probs[window, place - 1].tolist()
            loss = -sum(p * q for p, q in zip(target_probs, logprob.tolist()))
            losses[k].append(loss)
            if right:
                seen[k] += 1
                ce_loss[k] += loss
                right = named[int(logprob.argmax())] == tokens[place]
                hits[k] += right
    means = [sum(each) / len(each) if each else 0.0 for each in losses]
    mean = sum(w * m for w, m in zip(weights, means)) / sum(weights)
    assert outcome.loss.item() == pytest.approx(mean, rel=1e-4)
    assert outcome.seen.flatten().tolist() == seen and seen[0] > 12
    assert outcome.hits.flatten().tolist() == hits
    assert outcome.seen.shape == outcome.hits.shape == (blocks, count // blocks)
    assert outcome.ce_loss.flatten().tolist() == pytest.approx(ce_loss, rel=1e-4)


def plain_trunk(trunk: torch.nn.Module, inputs: Tensor, position: Tensor, mask: Tensor) -> Tensor:
    """Decoder layers over inputs [T, H] with an explicit mask [T, T] -> [T, H]."""

    def attend(_layer: int, *states: Tensor) -> Tensor:
        rows = (x.permute(1, 2, 0, 3) for x in states)
        mixed = scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3)

    return trunk(inputs, position, attend)
