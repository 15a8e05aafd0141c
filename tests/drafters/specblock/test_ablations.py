"""Drafters without a part of the paper's (Table 2): what is left out."""

from __future__ import annotations

import torch
from support.dense_cache import DenseCache
from support.records import small_drafter

from vllm_specblock.drafters.specblock.model import SpecBlockModel


def make(**changes) -> SpecBlockModel:
    return small_drafter(0, rank_topk=20, **changes).requires_grad_(False)


def test_without_broadcast_the_prefix_enters_at_position_1_alone():
    layer = make(prefix_broadcast=False).input_layer
    whole = make().input_layer
    whole.load_state_dict(layer.state_dict())
    norm = torch.nn.RMSNorm(32)
    one, two = (layer(torch.randn(3, 32), torch.randn(3, 32), norm)[0] for _ in range(2))
    assert not torch.allclose(one[:, 0], two[:, 0])
    assert torch.equal(one[:, 1:], two[:, 1:])
    condition, token = torch.randn(3, 32), torch.randn(3, 32)
    found, wanted = (each(condition, token, norm) for each in (layer, whole))
    torch.testing.assert_close(found[0][:, 0], wanted[0][:, 0])
    torch.testing.assert_close(found[1], norm(found[0]))


def test_without_shift_the_layers_follow_each_other():
    drafter = make(layer_shift=False)
    shifted = make()
    assert not [name for name in drafter.state_dict() if name.startswith("shift_proj")]
    weights = shifted.state_dict() | drafter.state_dict()
    # [I, 0] is no shift at all.
    weights["shift_proj.0.weight"] = torch.eye(32, 64)
    shifted.load_state_dict(weights)
    rows = torch.randn(3, 32), torch.randn(3, 32), torch.arange(1, 4)
    found, wanted = (d(*rows, DenseCache(d.config).append()) for d in (drafter, shifted))
    torch.testing.assert_close(found, wanted)
