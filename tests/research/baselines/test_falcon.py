"""Falcon's parallel pass against one block-causal sequence per row."""

from __future__ import annotations

import pytest
import torch
from baselines import trunk
from baselines.falcon import Falcon
from baselines.static_tree import default_hits
from safetensors.torch import load_file
from support.baseline_batches import (
    HIDDEN,
    TARGET_CONFIG,
    assert_outcome,
    embed,
    packed_lesson,
    plain_trunk,
    rows_of,
    script_to,
    train,
    vocabulary,
)
from support.trees import texts

FORWARDS = 3


@pytest.fixture(params=[2, 4])
def drafter(request) -> Falcon:
    d2t, t2d, _ = vocabulary()
    return Falcon.for_target(
        TARGET_CONFIG, d2t, t2d, 0, block=request.param, forwards=FORWARDS, lstm_layers=2, budget=25
    )


@pytest.fixture
def train_batch():
    return packed_lesson()


def fused(trunk, condition, tokens):
    both = [trunk.condition_norm(condition), trunk.token_norm(embed(tokens))]
    return torch.cat(both, -1) @ trunk.fuse.weight.T


@torch.no_grad()
def row_alone(drafter, train_batch, window, begin, column, fed: list[int]) -> list[torch.Tensor]:
    """Log-probabilities of a row's positions: the blocks up to it, then one block after another
    of its own states and of `fed`, the tokens after the root."""
    k, trunk = drafter.config.block_size, drafter.trunk
    here = slice(begin, column + 1)
    condition = train_batch.target_outputs.hidden[window, here] @ trunk.condition_proj.weight.T
    real = fused(trunk, condition, train_batch.batch.tokens[window, begin + 1 : column + 2])
    missing = -len(real) % k
    blocks = list(torch.cat([torch.zeros(missing, HIDDEN), real]).split(k))
    positions = []
    while True:
        inputs = torch.cat([block + drafter.lstm(block[None])[0][0] for block in blocks])
        number = torch.arange(len(inputs)) // k
        place = torch.arange(len(inputs)) + 1 - missing
        states = plain_trunk(trunk, inputs, place, number[:, None] >= number)[-k:]
        positions += list((drafter.norm(states) @ drafter.lm_head.weight.T).log_softmax(-1))
        done = len(positions)
        if done == k * drafter.config.forwards or len(fed) < done:
            return positions
        blocks.append(fused(trunk, states, torch.tensor(fed[done - k : done])))


def fed_by_text(batch, window, column) -> list[int]:
    """The tokens after a row's root. Past the document's end any do: nothing there is counted."""
    return [*batch.tokens[window].clamp(min=0).tolist(), *[0] * 9][column + 2 :]


def test_loss_is_that_of_every_row_alone(drafter, train_batch):
    count = drafter.config.block_size * FORWARDS

    def rows(window, begin, column):
        fed = fed_by_text(train_batch.batch, window, column)
        return row_alone(drafter, train_batch, window, begin, column, fed)

    assert_outcome(drafter(train_batch), rows, train_batch, [1.0] * count, FORWARDS)


@pytest.mark.parametrize("at_once", [4, 100])
def test_drafts_what_it_was_trained_to(drafter, train_batch, monkeypatch, at_once):
    monkeypatch.setattr(trunk, "_ROWS_AT_ONCE", at_once)
    named, block = vocabulary()[2], drafter.config.block_size
    # Two long paths that part at once: each forward goes on from several blocks of the one before.
    drafter.hits[:] = torch.tensor([0.99, 0.2] + [0.01] * 8)
    drafter.hits[0, :2] = 0.5
    whole = drafter.draft_along(script_to(train_batch, 8))
    for root in (1, 5, 8):
        tree = drafter.draft_along(script_to(train_batch, root))(root)
        found = texts(tree, 0)
        assert len(found) == 25
        assert len({path[0] for path in found if len(path) > 2 * block}) == 2
        for path, score in found.items():
            positions = row_alone(drafter, train_batch, 0, 0, root - 1, list(path))
            total = sum(positions[k][named.index(token)].item() for k, token in enumerate(path))
            assert score == pytest.approx(total, abs=1e-4)
        assert texts(whole(root), 0) == pytest.approx(found, abs=1e-5)


def test_learns_and_shapes_its_tree():
    d2t, t2d, _ = vocabulary()
    drafter = Falcon.for_target(TARGET_CONFIG, d2t, t2d, 0, forwards=2, budget=12)
    before, after = train(drafter)
    assert before < 0.4 and after > 0.9


def test_calibration_counts_ranks(drafter, train_batch):
    named, batch = vocabulary()[2], train_batch.batch
    right = torch.zeros(FORWARDS * drafter.config.block_size, 10)
    count = torch.zeros(len(right), 1)
    for window, begin, end, column in rows_of(batch):
        positions = row_alone(
            drafter, train_batch, window, begin, column, fed_by_text(batch, window, column)
        )
        for j, logprob in enumerate(positions[: end - column - 2]):
            place = column + 2 + j
            token = int(batch.tokens[window, place])
            if batch.loss_mask[window, place] and token in named:
                order = logprob.argsort(descending=True).tolist()
                rank = order.index(named.index(token))
                count[j] += 1
                right[j, rank : rank + 1] += 1  # past the last column: nothing
    prior = default_hits(*right.shape).float()
    assert torch.equal(drafter.hits, prior)
    drafter.calibrate([train_batch, train_batch])
    assert torch.allclose(drafter.hits, (2 * right + prior) / (2 * count + 1))


def test_every_weight_learns_and_is_saved(drafter, train_batch, tmp_path):
    drafter(train_batch).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())
    drafter.save(tmp_path)
    other = Falcon(drafter.config, *vocabulary()[:2], budget=25)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other.trunk.fuse.weight, drafter.trunk.fuse.weight.bfloat16().float())


def test_half_precision(drafter, train_batch):
    with torch.autocast("cpu", torch.bfloat16):
        half = drafter(train_batch)
    assert half.loss.item() == pytest.approx(drafter(train_batch).loss.item(), rel=0.03)
