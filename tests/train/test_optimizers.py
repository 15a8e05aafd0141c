"""The optimisers a drafter learns with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train.config import TrainConfig, TrainError, parse
from vllm_specblock.train.optimizers import MuonWithAdamW, make_optimizer, set_rate, slow_arithmetic

NEEDED = {"target": "T", "data": "D", "out": "O"}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 6, bias=False)
        self.norm = nn.RMSNorm(6)
        self.lm_head = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.proj(x)))


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


def muon(module: nn.Module, lr: float, weight_decay: float = 0.0) -> MuonWithAdamW:
    return MuonWithAdamW(list(module.named_parameters()), lr, weight_decay)


def update(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_matrices_between_states_are_muons_and_heads_are_not(small):
    inner, rest = (group["params"] for group in muon(small, 1e-3).param_groups)
    assert [id(p) for p in inner] == [id(small.proj.weight)]
    assert {id(p) for p in rest} == {id(small.norm.weight), id(small.lm_head.weight)}


def test_both_parts_move_at_the_rate_that_is_set(small):
    optimizer = muon(small, 1.0)
    set_rate(optimizer, 1e-3)
    before = {name: weight.detach().clone() for name, weight in small.named_parameters()}
    update(small, optimizer, 1)
    moved = {
        n: (w.detach() - before[n]).square().mean().sqrt() for n, w in small.named_parameters()
    }
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=0.1)  # Adam's first step
    # Orthogonal updates, scaled to AdamW's usual 0.2 of the rate per number.
    assert 0.5e-4 < moved["proj.weight"] < 4e-4


def test_a_saved_state_goes_on_to_the_same_bits(small):
    optimizer = muon(small, 1e-2, 0.01)
    for seed in range(3):
        update(small, optimizer, seed)
    model, state = copy.deepcopy((small.state_dict(), optimizer.state_dict()))
    assert len(state["state"]) == 3  # of both parts

    other = Small()
    other.load_state_dict(model)
    resumed = muon(other, 1e-2, 0.01)
    resumed.load_state_dict(state)
    for seed in range(3, 6):
        update(small, optimizer, seed)
        update(other, resumed, seed)
    for one, two in zip(small.parameters(), other.parameters()):
        assert torch.equal(one, two)


def test_sharded_weights_are_refused(small):
    config = parse(TrainConfig, optimizer="muon", parallel="shard", **NEEDED)
    with pytest.raises(TrainError, match="needs whole matrices"):
        make_optimizer(list(small.named_parameters()), config)


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
