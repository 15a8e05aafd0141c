"""Recorded rows teach what the text with all of the target's features would."""

from __future__ import annotations

import pytest
import torch
from lib.simulation import record_of
from support.records import HIDDEN, VOCAB, random_record, small_drafter, small_teacher

from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.train.config import Recipe
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target.features import TargetOutputs, target_probs_of


def random_script(teacher: RecordTeacher, length: int, prompt: int) -> EvalSequence:
    draw = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, 3 * HIDDEN, generator=draw)
    last = torch.randn(length, HIDDEN, generator=draw)
    tokens = torch.randint(VOCAB, (length,), generator=draw)
    return EvalSequence(tokens, prompt, hidden, last, teacher.embed)


def loss_of(drafter, train_batch) -> float:
    return float(SpecBlockLearner(drafter, Recipe(rank_from=0))(train_batch).loss.detach())


def test_a_record_of_a_whole_text_has_the_loss_of_the_text():
    drafter, teacher = small_drafter(), small_teacher()
    sequence = random_script(teacher, 30, prompt=7)
    loss_mask = torch.arange(30)[None] >= 7
    target_probs = target_probs_of(sequence.last[None], teacher.head)
    target_outputs = TargetOutputs(sequence.hidden[None], sequence.last[None], target_probs)
    whole = TrainBatch(
        Batch.of(sequence.tokens[None], loss_mask), target_outputs, teacher.embed, 5, seed=2
    )
    recorded = teacher.train_batch([record_of("r", sequence)], step=5, seed=2)
    assert loss_of(drafter, recorded) == pytest.approx(loss_of(drafter, whole), rel=1e-6)
    assert loss_of(drafter, recorded) > 0


def test_padding_of_a_batch_counts_nothing():
    """With one more record in the window's length, both losses are as of each alone."""
    drafter, teacher = small_drafter(), small_teacher()
    short, long = random_record("short", rows=9), random_record("longer", rows=21)
    both = SpecBlockLearner(drafter, Recipe(num_blocks=1))(teacher.train_batch([short, long], 0, 0))
    alone = [
        SpecBlockLearner(drafter, Recipe(num_blocks=1))(teacher.train_batch([each], 0, 0))
        for each in (short, long)
    ]
    assert torch.equal(both.seen, alone[0].seen + alone[1].seen)
    torch.testing.assert_close(both.ce_loss, alone[0].ce_loss + alone[1].ce_loss)
