"""A served drafter: linear layers and angles are torch's own, and it drafts what it drafted."""

from __future__ import annotations

import copy

import pytest
import torch
from support.dense_cache import DenseCache
from support.engines import DRAFTER, ROOT
from support.records import small_drafter
from torch import nn
from vllm_specblock.triton_kernels.layers.fp8_linear import Fp8Linear

from vllm_specblock.drafters.common.linear import (
    Joined,
    PackedLinear,
    add_linear,
    process_after_loading,
)
from vllm_specblock.drafters.common.rope import Rotary, inverse_frequencies
from vllm_specblock.drafters.specblock import checkpoint

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
        assert PackedLinear.takes(three(False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@BIAS
@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (5, 4), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("size", [(24, 16), (64, 48), (576, 3072)], ids=str)
@torch.no_grad()
def test_packed_for_a_cpu(bias, rows, size, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(*size, bias=bias).to(dtype)
    if not PackedLinear.takes(linear):
        pytest.skip("needs a processor with bfloat16 products")
    x = torch.randn(*rows, 2 * size[0], dtype=dtype)[..., : size[0]]
    packed, near = PackedLinear(linear), 1e-2 if dtype == torch.bfloat16 else 1e-5
    for wanted in (slice(None), slice(3, 9)):
        expected = linear(x)[..., wanted]
        torch.testing.assert_close(packed(x, wanted), expected, rtol=near, atol=near)


# ---- Made ready to serve ----
FIXTURES = ROOT / "tests/fixtures"
ROWS = 7


@pytest.fixture(scope="module")
def drafter():
    return checkpoint.load(DRAFTER, torch.float32, "cpu").eval()


@torch.no_grad()
def run(drafter, width=8, keep=None):
    """keep: rows whose outputs are wanted."""
    torch.manual_seed(0)
    config = drafter.config
    features = torch.randn(ROWS, 3 * config.target_hidden_size)
    embedding = torch.randn(ROWS, config.hidden_size)
    attend = DenseCache(config).append(keep)
    hidden = drafter(drafter.condition(features), embedding, torch.arange(ROWS), attend, keep)
    return hidden, *drafter.candidates(hidden, width)


@pytest.mark.parametrize("folder", [DRAFTER, FIXTURES / "llama", FIXTURES / "qwen"], ids=str)
@pytest.mark.parametrize("prefix_broadcast", [True, False], ids=["all positions", "the first"])
def test_the_served_model_is_the_trained_one(monkeypatch, folder, prefix_broadcast):
    monkeypatch.setattr(PackedLinear, "takes", lambda linear: False)  # it rounds otherwise
    plain = checkpoint.load(folder, torch.float32).eval()
    plain.input_layer.prefix_broadcast = prefix_broadcast
    folded = process_after_loading(copy.deepcopy(plain), None)
    size = plain.config.hidden_size
    assert folded.input_layer.fuse.weight.shape == (size, 2 * size)
    assert plain.input_layer.fuse.weight.shape == (size, 3 * size), "the original was changed"
    near = {"atol": 1e-5, "rtol": 1e-5}
    folded.input_layer.position_queries.weight.data.zero_()  # folded in
    for mine, theirs in zip(run(folded), run(plain)):
        torch.testing.assert_close(mine, theirs, **near)
    keep = torch.tensor([5, 0])
    torch.testing.assert_close(run(folded, keep=keep)[0], run(plain, keep=keep)[0], **near)


def test_eight_bits_are_half_the_bytes_and_nearly_the_same_draft(drafter):
    full, short = process_after_loading(copy.deepcopy(drafter), None), copy.deepcopy(drafter)
    short = process_after_loading(short, "fp8")
    kinds = {name: type(module) for name, module in short.named_modules()}
    for name, module in full.named_modules():
        if isinstance(module, nn.Linear | PackedLinear):
            kept = name.startswith(("shift_proj", "rank_head"))
            assert kinds[name] is (nn.Linear if kept else Fp8Linear), name
    of = short.layers[0].mlp.down_proj
    assert of.weight.itemsize == 1 and of.scale.numel() == of.weight.shape[0]
    (hidden, logprob, token, _), (wanted, wanted_logprob, wanted_token, _) = run(short), run(full)
    error = (hidden - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.1
    assert (token[..., 0] == wanted_token[..., 0]).float().mean() > 0.75
    assert (logprob[..., 0] - wanted_logprob[..., 0]).abs().mean() < 0.2


# ---- Angles from kept tables are those of the definition, to the last bit ----
CONFIG = small_drafter(head_dim=64, rope_theta=5e5).config


def by_definition(base, dtype, config):
    """cos and signed sin of every position, [T, K, 1, D]."""
    position = base[:, None] + torch.arange(CONFIG.block_size)
    angle = position[..., None, None].float() * inverse_frequencies(config, config.head_dim)[0]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}], ids=str)
def test_no_bit_changes_through_a_meta_device_and_another_dtype(scaling, dtype):
    config = CONFIG.model_copy(update={"rope_scaling": scaling})
    with torch.device("meta"):
        rotary = Rotary(config, block_size=CONFIG.block_size)
    rotary = rotary.to_empty(device="cpu").to(torch.bfloat16)
    base = torch.cat([torch.arange(40), torch.randint(1 << 20, (500,))])
    for found, wanted in zip(rotary(base, dtype).table, by_definition(base, dtype, config)):
        assert found.dtype == dtype and torch.equal(found, wanted)


def test_a_part_of_a_head_is_scaled_once():
    """The dimensions that turn are counted already; a checkpoint names their share as well."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    whole, part = (
        CONFIG.model_copy(update={"rope_scaling": scaling | share})
        for share in ({}, {"partial_rotary_factor": 0.5})
    )
    assert torch.equal(inverse_frequencies(part, 32)[0], inverse_frequencies(whole, 32)[0])
