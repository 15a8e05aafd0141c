"""Stacked layers give what each gives, and memory holds them once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_specblock.drafters.common.linear import (
    Fp8Linear,
    Int8Linear,
    Joined,
    PackedLinear,
    Stacked,
    add_linear,
)


def three(bias):
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias) for size in (16, 4, 9)]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("wanted", [slice(None), slice(0, 1), slice(1, 3), slice(2, None)], ids=str)
@torch.no_grad()
def test_each_layers_result(bias, wanted):
    layers = three(bias)
    stacked, x = Stacked(*layers), torch.randn(5, 2, 24)
    found = stacked(x, wanted)
    assert len(found) == len(layers[wanted])
    for mine, layer in zip(found, layers[wanted]):
        torch.testing.assert_close(mine, layer(x))
    assert len({mine.untyped_storage().data_ptr() for mine in found}) == 1, "one product, no copies"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_in_eight_bits(bias):
    """Shortened as one it is what its layers are, shortened one by one: scales are per output."""
    layers = three(bias)
    stacked, x = Stacked(*layers), torch.randn(5, 24)
    stacked.product = Fp8Linear(stacked.product)
    for wanted in (slice(None), slice(0, 1), slice(1, 3)):
        for mine, layer in zip(stacked(x, wanted), layers[wanted], strict=True):
            torch.testing.assert_close(mine, Fp8Linear(layer)(x))


def test_a_joined_layer_learns_nothing():
    joined = Joined(three(True))
    assert joined.out_features == len(joined.weight) == len(joined.bias) == 29
    assert not any(p.requires_grad for p in joined.parameters())


@pytest.mark.parametrize("short", [False, True], ids=["full", "fp8"])
@torch.no_grad()
def test_onto_a_sum(short):
    torch.manual_seed(0)
    linear = nn.Linear(24, 8, bias=False)
    linear = Fp8Linear(linear) if short else linear
    residual, x = torch.randn(3, 2, 8), torch.randn(3, 2, 24)
    wanted = residual + linear(x)
    torch.testing.assert_close(add_linear(residual, x, linear), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("short", [False, True], ids=["full", "fp8"])
@torch.no_grad()
def test_onto_a_sum_in_one_launch(short):
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    linear = Fp8Linear(linear) if short else linear
    residual, x = (torch.randn(3, 2, n, device="cuda").bfloat16() for n in (64, 256))
    wanted = residual + linear(x)
    torch.testing.assert_close(add_linear(residual, x, linear), wanted, atol=3e-2, rtol=3e-2)


def test_what_the_processor_cannot_multiply_is_not_packed(monkeypatch):
    linear = three(False)[0].bfloat16()
    for packs in (True, False):
        monkeypatch.setattr(PackedLinear, "packs", lambda packs=packs: packs)
        assert PackedLinear.takes(linear) == packs
        assert not PackedLinear.takes(three(False)[0])


@pytest.mark.skipif(not PackedLinear.packs(), reason="needs a processor with bfloat16 products")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [(1,), (7,), (5, 4), (2, 3, 33)], ids=str)
@torch.no_grad()
def test_packed_for_a_cpu(bias, rows):
    linear = three(bias)[0].bfloat16()
    assert PackedLinear.takes(linear) and not PackedLinear.takes(three(bias)[0])
    x = torch.randn(*rows, 24, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    for wanted in (slice(None), slice(3, 9)):
        expected = linear(x)[..., wanted]
        torch.testing.assert_close(packed(x, wanted), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_packed_for_tiles_gives_a_row_the_same_bits_in_any_batch(bias):
    pytest.importorskip("vllm._C")
    linear = nn.Linear(64, 48, bias=bias).bfloat16()
    packed = PackedLinear(linear)
    assert packed.tiled and not PackedLinear(three(bias)[0].bfloat16()).tiled
    x = torch.randn(3, 11, 128, dtype=torch.bfloat16)[..., :64]
    many = packed(x)
    torch.testing.assert_close(many, linear(x), rtol=1e-2, atol=1e-2)
    for count in (0, 1, 4, 9):
        assert torch.equal(packed(x[:1, :count]), many[:1, :count])
    assert torch.equal(packed(x, slice(16, 33)), many[..., 16:33])


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_integers_of_eight_bits_are_within_two_hundredths(bias):
    pytest.importorskip("vllm._C")
    linear = nn.Linear(64, 96, bias=bias).bfloat16()
    assert Int8Linear.takes(linear) and not Int8Linear.takes(three(bias)[0].bfloat16())
    x = torch.randn(3, 11, 128, dtype=torch.bfloat16)[..., :64]
    linear.weight[5] = 0
    many, wanted = Int8Linear(linear)(x), linear(x)
    assert (many - wanted).float().norm() < 0.02 * wanted.float().norm()
    for count in (1, 4, 9):
        torch.testing.assert_close(Int8Linear(linear)(x[:1, :count]), many[:1, :count])
    assert torch.equal(Int8Linear(linear)(x, slice(16, 33)), many[..., 16:33])
