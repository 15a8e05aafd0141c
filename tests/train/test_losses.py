from __future__ import annotations

import pytest
import torch

from vllm_specblock.train import losses
from vllm_specblock.train.learner import IGNORE_INDEX
from vllm_specblock.train.losses import block_loss, rank_bucket


@pytest.fixture
def block(make_drafter):
    """Arguments of `block_loss` for 40 rows whose labels are often the drafter's choice."""
    drafter = make_drafter()
    rows, K = 40, drafter.config.block_size
    hidden = torch.randn(rows, K, drafter.config.hidden_size, requires_grad=True)
    with torch.no_grad():
        choice = drafter.heads(hidden)[0].argmax(-1)
    label = choice.where(torch.rand(rows, K) < 0.7, torch.randint(14, (rows, K)))
    label = label.where(torch.rand(rows, K) < 0.9, IGNORE_INDEX)
    return {
        "drafter": drafter,
        "hidden": hidden,
        "label": label,
        "target_probs": torch.randn(30, 14).softmax(-1),
        "target_row": torch.randint(30, (rows, K)),
        "start": torch.rand(rows) < 0.8,
        "rank": True,
    }


def test_rejected_positions_alone(block):
    """Of each path its last position, where the choice is wrong; paths themselves are the same."""
    whole = block_loss(**block)
    loss = block_loss(**block, rejected_only=True)
    assert torch.equal(loss.on_path, whole.on_path) and torch.equal(loss.hit, whole.hit)
    wrong = whole.on_path & ~whole.hit
    assert loss.num_positions.tolist() == wrong.sum(0).tolist() and wrong.any(0).all()
    expected = [0.0] * 4
    for t, k in wrong.nonzero().tolist():
        logits = block["drafter"].heads(block["hidden"][t, k])[0]
        p = block["target_probs"][block["target_row"][t, k]]
        expected[k] -= float((p * logits.detach().log_softmax(-1)).sum())
    assert loss.draft.tolist() == pytest.approx(expected, rel=1e-5)
    assert 0 < loss.rank < whole.rank
    loss.draft.sum().backward()
    reached = block["hidden"].grad.abs().sum(-1) > 0
    assert torch.equal(reached, wrong)


def test_gradients_are_those_of_autograd(block, monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 7)
    drafter, hidden = block["drafter"], block["hidden"]
    loss = block_loss(**block)
    parameters = [hidden, drafter.lm_head.weight, drafter.norm.weight]
    found = torch.autograd.grad(loss.draft.sum(), parameters)
    rows, k = loss.on_path.nonzero(as_tuple=True)
    log_probs = drafter.lm_head(drafter.norm(hidden[rows, k])).log_softmax(-1)
    p = block["target_probs"][block["target_row"][rows, k]]
    wanted = torch.autograd.grad(-(p * log_probs).sum(), parameters)
    for mine, other in zip(found, wanted):
        torch.testing.assert_close(mine, other)


def test_without_the_valid_prefix_a_wrong_choice_ends_no_path(block):
    masked, free = block_loss(**block), block_loss(**block, valid_prefix=False)
    named = (block["label"] != IGNORE_INDEX).cumprod(1).bool() & block["start"][:, None]
    assert free.num_positions.tolist() == named.sum(0).tolist()
    assert (free.num_positions > masked.num_positions)[1:].all()
    assert torch.equal(free.on_path, masked.on_path) and torch.equal(free.hit, masked.hit)


def test_no_row_on_the_path_is_no_loss(block):
    loss = block_loss(**block | {"start": torch.zeros(40, dtype=torch.bool)})
    assert not loss.draft.any() and loss.rank == 0 and not loss.on_path.any()


@pytest.mark.parametrize(
    ("second", "on_path"),
    [
        (lambda label: IGNORE_INDEX, [True, False, False, False]),  # it cannot be named
        (lambda label: (label + 1) % 14, [True, True, False, False]),  # a wrong choice
    ],
)
def test_where_a_path_ends(block, second, on_path):
    drafter, block["hidden"] = block["drafter"], block["hidden"][:1]
    label = drafter.heads(block["hidden"])[0].argmax(-1)  # all right, but for position 2
    label[0, 1] = second(label[0, 1])
    block |= {"label": label, "target_row": block["target_row"][:1], "rank": False}
    loss = block_loss(**block | {"start": torch.tensor([True])})
    assert loss.on_path.tolist() == [on_path]
    assert loss.hit.tolist() == [[True, False, False, False]]
    loss.draft.sum().backward()
    assert loss.rank == 0 and drafter.rank_head[0].weight.grad is None


def test_rank_gradient_stays_in_the_rank_head(block):
    block_loss(**block).rank.backward()
    reached = {n for n, p in block["drafter"].named_parameters() if p.grad is not None}
    assert reached == {"rank_head.0.weight", "rank_head.2.weight"}
    assert block["hidden"].grad is None


@pytest.mark.parametrize(
    ("rank", "bucket"), [(1, 0), (2, 1), (4, 1), (5, 2), (10, 2), (11, 3), (14, 3)]
)
def test_rank_buckets(rank, bucket):
    logits = torch.arange(14, 0, -1.0)[None]  # label i has rank i + 1
    assert rank_bucket(logits, torch.tensor([rank - 1])).tolist() == [bucket]
