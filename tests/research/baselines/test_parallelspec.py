"""ParallelSpec's grouped pass against one plain causal sequence per row."""

from __future__ import annotations

import pytest
import torch
from baselines import trunk
from baselines.parallelspec import ParallelSpec
from safetensors.torch import load_file
from support.baseline_batches import (
    TARGET_CONFIG,
    assert_drafts,
    assert_outcome,
    embed,
    packed_lesson,
    plain_trunk,
    train,
    vocabulary,
)

K = 4


@pytest.fixture
def drafter() -> ParallelSpec:
    d2t, t2d, _ = vocabulary()
    return ParallelSpec.for_target(TARGET_CONFIG, d2t, t2d, 0, positions=K, budget=15)


@pytest.fixture
def train_batch():
    return packed_lesson()


@torch.no_grad()
def row_alone(drafter, train_batch, window, begin, column) -> list[torch.Tensor]:
    """Log-probabilities of a row's positions: its document up to it, then the mask tokens."""
    here = slice(begin, column + 1)
    trunk = drafter.trunk
    condition = trunk.condition_norm(
        train_batch.target_outputs.hidden[window, here] @ trunk.condition_proj.weight.T
    )
    token = trunk.token_norm(embed(train_batch.batch.tokens[window, begin + 1 : column + 2]))
    real = torch.cat([condition, token], -1) @ trunk.fuse.weight.T
    inputs = torch.cat([real, drafter.mask_tokens])
    count = len(inputs)
    causal = torch.ones(count, count).tril().bool()
    states = plain_trunk(trunk, inputs, torch.arange(1, count + 1), causal)[-K:]
    return list((drafter.norm(states) @ drafter.lm_head.weight.T).log_softmax(-1))


def test_loss_is_that_of_every_row_alone(drafter, train_batch):
    def rows(*where):
        return row_alone(drafter, train_batch, *where)

    assert_outcome(drafter(train_batch), rows, train_batch, [1.0] * K)


@pytest.mark.parametrize("at_once", [3, 100])
def test_drafts_what_it_was_trained_to(drafter, train_batch, monkeypatch, at_once):
    monkeypatch.setattr(trunk, "_ROWS_AT_ONCE", at_once)

    def positions(root):
        return row_alone(drafter, train_batch, 0, 0, root - 1)

    assert_drafts(drafter, train_batch, positions, 1e-5)


def test_learns():
    d2t, t2d, _ = vocabulary()
    before, after = train(ParallelSpec.for_target(TARGET_CONFIG, d2t, t2d, 0, positions=3))
    assert before < 0.4 and after > 0.9


def test_every_weight_learns_and_is_saved(drafter, train_batch, tmp_path):
    drafter(train_batch).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())
    drafter.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    other = ParallelSpec(drafter.config, *vocabulary()[:2], budget=15)
    other.load_state_dict(tensors)
    assert torch.equal(other.mask_tokens, drafter.mask_tokens.bfloat16().float())


def test_half_precision_and_one_seed_one_drafter(drafter, train_batch):
    d2t, t2d, _ = vocabulary()
    twin = ParallelSpec.for_target(TARGET_CONFIG, d2t, t2d, 0, positions=K)
    assert torch.equal(twin.mask_tokens, drafter.mask_tokens)
    assert torch.equal(twin.trunk.fuse.weight, drafter.trunk.fuse.weight)
    with torch.autocast("cpu", torch.bfloat16):
        half = drafter(train_batch)
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == pytest.approx(drafter(train_batch).loss.item(), rel=0.03)
