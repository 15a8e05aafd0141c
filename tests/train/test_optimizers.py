"""The optimisers a drafter learns with."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train.config import TrainConfig, TrainError, parse
from vllm_specblock.train.optimizers import make_optimizers, slow_arithmetic

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
