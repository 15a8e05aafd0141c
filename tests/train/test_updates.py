"""One update: losses, optimisers, and what is logged of it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from support.records import small_drafter
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train import losses
from vllm_specblock.train.config import TrainConfig, TrainError, parse
from vllm_specblock.train.learner import IGNORE_INDEX, LossOutput
from vllm_specblock.train.losses import block_loss
from vllm_specblock.train.optimizers import make_optimizers, slow_arithmetic
from vllm_specblock.train.train_state import MetricsLog, describe


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


NEEDED = {"target": "T", "data": "D", "out": "O"}


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(0)
    proj, head = nn.Linear(8, 6, bias=False), nn.Linear(6, 10, bias=False)
    return nn.Sequential(OrderedDict(proj=proj, norm=nn.RMSNorm(6), lm_head=head))


def muon(module: nn.Module, **options) -> list[torch.optim.Optimizer]:
    config = parse(TrainConfig, optimizer="muon", **NEEDED, **options)
    return make_optimizers(list(module.named_parameters()), config)


def test_matrices_between_states_are_muons_and_heads_are_not(small):
    inner, rest = muon(small, lr=1e-3, weight_decay=0.0)
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(small.proj.weight)]
    others = {id(p) for p in rest.param_groups[0]["params"]}
    assert others == {id(small.norm.weight), id(small.lm_head.weight)}
    before = {name: weight.detach().clone() for name, weight in small.named_parameters()}
    small(torch.randn(16, 8)).square().mean().backward()
    inner.step(), rest.step()
    moved = {
        n: (w.detach() - before[n]).square().mean().sqrt() for n, w in small.named_parameters()
    }
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=0.1)  # Adam's first step
    # Orthogonal updates, scaled to AdamW's usual 0.2 of the rate per number.
    assert 0.5e-4 < moved["proj.weight"] < 4e-4


def test_muon_refuses_sharded_weights(small):
    with pytest.raises(TrainError, match="needs whole matrices"):
        muon(small, parallel="shard")


@pytest.mark.parametrize(
    ("precision", "optimizer", "changes"),
    [
        ("bf16", "adamw", "take precision fp32."),
        ("fp32", "muon", "take optimizer adamw."),
        ("bf16", "muon", "take precision fp32 and optimizer adamw."),
        ("fp32", "adamw", None),
    ],
)
def test_what_is_slow_on_a_processor_without_bfloat16(monkeypatch, precision, optimizer, changes):
    config = parse(TrainConfig, **NEEDED, precision=precision, optimizer=optimizer)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(PackedLinear, "packs", lambda: False)
    said = slow_arithmetic(config, cpu)
    assert said is None if changes is None else said.endswith(changes)
    assert slow_arithmetic(config, gpu) is None
    monkeypatch.setattr(PackedLinear, "packs", lambda: True)
    assert slow_arithmetic(config, cpu) is None


def outcome(ce_loss, hits, seen, rank) -> LossOutput:
    grids = [torch.tensor(grid, dtype=torch.float32) for grid in (ce_loss, hits, seen)]
    return LossOutput(torch.tensor(0.0), *grids, torch.tensor(rank))


def test_means_are_over_positions_since_the_last_entry():
    first = outcome([[8.0, 6.0], [2.0, 0.0]], [[4, 1], [1, 0]], [[8, 4], [2, 1]], 1.0)
    second = outcome([[4.0, 0.0], [0.0, 0.0]], [[2, 2], [0, 0]], [[4, 2], [0, 0]], 2.0)
    metrics_log = MetricsLog()
    metrics_log.add(first)
    metrics_log.add(second)
    entry = metrics_log.entry(step=7)
    assert entry["step"] == 7
    assert entry["loss"] == [[1.0, 1.0], [1.0, 0.0]]  # 12 / 12, 6 / 6, 2 / 2, nothing
    assert entry["alpha"] == [[0.5, 0.5], [0.5, 0.0]]  # 6 / 12, 3 / 6, 1 / 2, 0 / 1
    assert entry["accuracy"] == [[0.5, 0.25], [0.5, 0.0]]  # of 12 paths, of 2 paths
    assert entry["rank_loss"] == 1.5
    assert describe(entry) == "nats 1.00 rank 1.50 α% 50 50 | 50 0"
    metrics_log.add(second)
    assert metrics_log.entry(step=8)["alpha"] == [[0.5, 1.0], [0.0, 0.0]]
    assert [entry["step"] for entry in metrics_log.entries] == [7, 8]
