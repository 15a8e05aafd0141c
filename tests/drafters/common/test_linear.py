"""Linear layers of a served drafter give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_specblock.drafters.common.linear import (
    Fp8Linear,
    Joined,
    PackedLinear,
    add_linear,
)

BIAS = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
SHORT = pytest.mark.parametrize("short", [False, True], ids=["full", "fp8"])
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def three(bias):
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias) for size in (16, 4, 9)]


@BIAS
@SHORT
@pytest.mark.parametrize("first", [0, 1, 2])
@torch.no_grad()
def test_each_layers_result(bias, short, first):
    """In 8 bits, too: scales are per output."""
    layers = three(bias)
    joined, x = Joined(*layers), torch.randn(5, 2, 24)
    if short:
        joined = Fp8Linear(joined)
    before = sum(layer.out_features for layer in layers[:first])
    found = joined(x, slice(before, None)).split([each.out_features for each in layers[first:]], -1)
    for mine, layer in zip(found, layers[first:], strict=True):
        torch.testing.assert_close(mine, (Fp8Linear(layer) if short else layer)(x))


@SHORT
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@torch.no_grad()
def test_onto_a_sum(short, device):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    linear = nn.Linear(256, 64, bias=False, device=device, dtype=dtype)
    linear = Fp8Linear(linear) if short else linear
    residual, x = (torch.randn(3, 2, n, device=device, dtype=dtype) for n in (64, 256))
    wanted = residual + linear(x)
    near = {"atol": 3e-2, "rtol": 3e-2} if device == "cuda" else {}
    torch.testing.assert_close(add_linear(residual, x, linear), wanted, **near)


def test_what_the_processor_cannot_multiply_is_not_packed(monkeypatch):
    linear = three(False)[0].bfloat16()
    for packs in (True, False):
        monkeypatch.setattr(PackedLinear, "packs", lambda packs=packs: packs)
        assert PackedLinear.takes(linear) == packs
        assert not PackedLinear.takes(three(False)[0])


@pytest.mark.skipif(not PackedLinear.packs(), reason="needs a processor with bfloat16 products")
@BIAS
@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (5, 4), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("size", [(24, 16), (64, 48), (576, 3072)], ids=str)
@torch.no_grad()
def test_packed_for_a_cpu(bias, rows, size):
    torch.manual_seed(0)
    linear = nn.Linear(*size, bias=bias).bfloat16()
    x = torch.randn(*rows, 2 * size[0], dtype=torch.bfloat16)[..., : size[0]]
    packed = PackedLinear(linear)
    for wanted in (slice(None), slice(3, 9)):
        expected = linear(x)[..., wanted]
        torch.testing.assert_close(packed(x, wanted), expected, rtol=1e-2, atol=1e-2)
