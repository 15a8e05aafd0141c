"""A drafter made ready to serve drafts what it drafted, or nearly so in 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from support.dense_cache import DenseCache
from support.engines import DRAFTER, ROOT
from torch import nn

from vllm_specblock.drafters.common.linear import Fp8Linear, process_after_loading
from vllm_specblock.drafters.specblock import checkpoint

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
def test_the_served_model_is_the_trained_one(folder, prefix_broadcast):
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
        if isinstance(module, nn.Linear):
            kept = name.startswith(("shift_proj", "rank_head"))
            assert kinds[name] is (nn.Linear if kept else Fp8Linear), name
    of = short.layers[0].mlp.down_proj
    assert of.weight.itemsize == 1 and of.scale.numel() == of.weight.shape[0]
    (hidden, logprob, token, _), (wanted, wanted_logprob, wanted_token, _) = run(short), run(full)
    error = (hidden - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.1
    assert (token[..., 0] == wanted_token[..., 0]).float().mean() > 0.75
    assert (logprob[..., 0] - wanted_logprob[..., 0]).abs().mean() < 0.2
