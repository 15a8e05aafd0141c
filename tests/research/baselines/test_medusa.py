"""Medusa heads against their formula."""

from __future__ import annotations

import json

import pytest
import torch
from baselines.medusa import Medusa
from safetensors.torch import load_file
from support.baseline_batches import (
    DRAFT_VOCAB,
    HIDDEN,
    TARGET_CONFIG,
    VOCAB,
    assert_outcome,
    lesson_of,
    packed_lesson,
    script_to,
    train,
    vocabulary,
)
from support.trees import texts

from vllm_specblock.train.data.batch import Batch


@pytest.fixture
def medusa() -> Medusa:
    d2t, t2d, _ = vocabulary()
    made = Medusa.for_target(TARGET_CONFIG, d2t, t2d, 0, num_heads=4, num_layers=2, budget=15)
    for block in made.blocks:
        for layer in block.layers:
            torch.nn.init.normal_(layer.weight, std=0.3)
    return made


@pytest.fixture
def train_batch():
    return packed_lesson()


def by_formula(medusa: Medusa, last: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities [Vd] of each head after one state [Ht]."""
    out = []
    for block in medusa.blocks:
        x = last
        for layer in block.layers:
            z = layer.weight @ x
            x = x + z / (1 + torch.exp(-z))
        out.append((medusa.lm_head.weight @ x).log_softmax(-1).detach())
    return out


def test_loss_is_that_of_every_row_alone(medusa, train_batch):
    def rows(window, begin, column):
        return by_formula(medusa, train_batch.target_outputs.last[window, column])

    weights = [0.8, 0.64, 0.512, 0.4096]
    assert_outcome(medusa(train_batch), rows, train_batch, weights, rel=1e-5)


def test_window_shorter_than_the_heads(medusa):
    outcome = medusa(lesson_of(Batch.of(torch.tensor([[4, 5, 6]]))))
    assert outcome.loss.isfinite() and outcome.seen[0, 1:].sum() == 0


def test_drafts_from_the_newest_state(medusa, train_batch):
    named = vocabulary()[2]
    for root in (1, 6):
        tree = medusa.draft_along(script_to(train_batch, root))(root)
        heads = by_formula(medusa, train_batch.target_outputs.last[0, root - 1])
        found = texts(tree, 0)
        assert len(found) == 15
        for path, score in found.items():
            total = sum(heads[k][named.index(token)].item() for k, token in enumerate(path))
            assert score == pytest.approx(total, abs=1e-5)
        best = named[int(heads[0].argmax())]
        assert tree.token[0, 0] == best


def test_starts_as_the_target_and_learns():
    d2t, t2d, _ = vocabulary()
    head = torch.randn(DRAFT_VOCAB, HIDDEN)
    medusa = Medusa.for_target(TARGET_CONFIG, d2t, t2d, 0, head, num_heads=3)
    last = torch.randn(HIDDEN)
    for logits in medusa.logits(medusa.states(last)):
        assert torch.allclose(logits, head @ last, atol=1e-5)
    before, after = train(medusa)
    assert before < 0.4 and after > 0.9


def test_what_is_saved_makes_the_same_first_choices(medusa, tmp_path):
    medusa.save(tmp_path)
    medusa.save(tmp_path)  # over what is there
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["truncated_vocab_size"] == config["vocab_size"] == VOCAB
    assert (config["num_heads"], config["num_hidden_layers"]) == (4, 2)
    assert tensors.keys() == dict(medusa.named_parameters()).keys()
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    medusa.load_state_dict(
        {name: value for name, value in tensors.items() if name != "lm_head.weight"}, strict=False
    )
    states = medusa.states(torch.randn(200, HIDDEN))
    mine = medusa.best(states, 1)[1][..., 0]
    assert mine.unique().numel() > 5
    agree = (states @ tensors["lm_head.weight"].float().T).argmax(-1) == mine
    assert agree.float().mean() > 0.98  # bf16 rounds the LM head
