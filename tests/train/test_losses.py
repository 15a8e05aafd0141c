from __future__ import annotations

import pytest
import torch
from support.records import small_drafter

from vllm_specblock.train import losses
from vllm_specblock.train.learner import IGNORE_INDEX
from vllm_specblock.train.losses import block_loss


@pytest.fixture
def block():
    """Arguments of `block_loss` for 40 rows whose labels are often the drafter's choice."""
    drafter = small_drafter()
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


def test_rank_gradient_stays_in_the_rank_head(block):
    block_loss(**block).rank.backward()
    reached = {n for n, p in block["drafter"].named_parameters() if p.grad is not None}
    assert reached == {"rank_head.0.weight", "rank_head.2.weight"}
    assert block["hidden"].grad is None
