"""DFlash's and JetSpec's pass over all blocks of a batch against one plain block per root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from baselines import trunk
from baselines.mask_blocks import DFlash, JetSpec
from safetensors.torch import load_file
from support.baseline_batches import (
    DRAFT_VOCAB,
    HIDDEN,
    TARGET_CONFIG,
    assert_drafts,
    assert_outcome,
    embed,
    packed_lesson,
    train,
    vocabulary,
)
from support.dflash import plain_logits

from vllm_specblock.drafters.registry import drafter_kind

MASKS, MASK = 3, 19
HEAD = torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def make(kind: type[DFlash], **options) -> DFlash:
    d2t, t2d, _ = vocabulary()
    options = {"masks": MASKS, "budget": 15} | options
    return kind.for_target(TARGET_CONFIG, d2t, t2d, 0, HEAD, mask_token_id=MASK, **options)


@pytest.fixture(params=[DFlash, JetSpec])
def drafter(request) -> DFlash:
    return make(request.param)


@pytest.fixture
def train_batch():
    return packed_lesson()


@torch.no_grad()
def row_alone(drafter, folder: Path, train_batch, window, begin, column) -> list[torch.Tensor]:
    """Log-probabilities of the masks behind the root after a row: its document up to the row."""
    raw = json.loads((folder / "config.json").read_text())
    weights = {name: weight.detach() for name, weight in drafter.named_parameters()}
    features = train_batch.target_outputs.hidden[window, begin : column + 1]
    root = int(train_batch.batch.tokens[window, column + 1])
    block = embed(torch.tensor([root, *[MASK] * MASKS]))
    return list(plain_logits(weights, raw, HEAD, features, block)[1:].log_softmax(-1))


def test_loss_is_that_of_every_block_alone(drafter, train_batch, tmp_path):
    drafter.save(tmp_path)

    def rows(*where):
        return row_alone(drafter, tmp_path, train_batch, *where)

    falling = [1.0, 0.60653, 0.36788]
    weights = falling if type(drafter) is DFlash else [1.0] * MASKS
    assert_outcome(drafter(train_batch), rows, train_batch, weights)


@pytest.mark.parametrize("at_once", [3, 100])
def test_drafts_what_it_was_trained_to(drafter, train_batch, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(trunk, "_ROWS_AT_ONCE", at_once)
    drafter.save(tmp_path)

    def positions(root):
        return row_alone(drafter, tmp_path, train_batch, 0, 0, root - 1)

    assert_drafts(drafter, train_batch, positions, 1e-4)


@pytest.mark.parametrize("kind", [DFlash, JetSpec])
def test_learns(kind):
    before, after = train(make(kind), updates=60)
    assert before < 0.4 and after > 0.9


def test_every_weight_learns_and_is_saved_as_what_we_serve(drafter, train_batch, tmp_path):
    drafter(train_batch).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())
    drafter.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == dict(drafter.named_parameters()).keys()
    served = drafter_kind(drafter.kind).load_checkpoint_module().load(tmp_path)
    assert served.config == drafter.config
    for name, weight in served.named_parameters():
        assert torch.equal(weight, drafter.get_parameter(name).bfloat16().float())


def test_one_seed_one_drafter_and_half_precision(drafter, train_batch):
    norm = torch.full((HIDDEN,), 2.0)
    twin = make(type(drafter), final_norm=norm)
    assert torch.equal(twin.fc.weight, drafter.fc.weight) and torch.equal(twin.norm.weight, norm)
    with torch.autocast("cpu", torch.bfloat16):
        half = drafter(train_batch)
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == pytest.approx(drafter(train_batch).loss.item(), rel=0.03)
