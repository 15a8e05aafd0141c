"""The best tokens of draft logits: the two launches against torch."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


def load(kernels):
    return kernels.load("topk_tokens").topk_tokens_triton


def distinct_logits(lead, vocab, dtype, device):
    """No two of a row are equal, in any dtype: a grid of 1/64 around 0, shuffled."""
    torch.manual_seed(vocab)
    order = torch.rand(*lead, vocab).argsort(-1)
    return ((order - vocab // 2) / 64).to(device, dtype)


def assert_close(got, wanted) -> None:
    """Compares dtypes, too; tokens have to be equal."""
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


SHAPES = [((3,), 2, 1), ((2, 3), 10, 10), ((2, 4), 77, 3), ((1, 2), 250, 33), ((2,), 1, 1)]


@pytest.mark.parametrize(
    ("dtype", "lead", "vocab", "width"),
    [
        *((dtype, *shape) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)),
        (torch.float32, (2, 1), 3000, 10),  # many chunks
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("sharp", "scale"), [(False, 1.0), (True, 0.37)], ids=["as drafted", "sharpened and scaled"]
)
def test_as_torch_does(kernels, lead, vocab, width, dtype, sharp, scale):
    logits = distinct_logits(lead, vocab, dtype, kernels.device)
    offset = torch.randint(0, 50, (vocab,), device=kernels.device)
    beta = torch.linspace(2.5, 0.4, lead[0], device=kernels.device) if sharp else None
    got = load(kernels)(logits, offset, width, scale, beta)
    assert_close(got, topk_tokens.reference(logits, offset, width, scale, beta))


def test_of_equal_logits_the_first_comes_first(kernels):
    logits = torch.zeros(2, 1200, device=kernels.device)
    logits[0, [7, 1100, 3]] = 1.0
    offset = torch.zeros(1200, dtype=torch.int64, device=kernels.device)
    _, token = load(kernels)(logits, offset, 5)
    assert token.tolist() == [[3, 7, 1100, 0, 1], [0, 1, 2, 3, 4]]


def test_strided_logits_and_no_rows(kernels):
    wide = distinct_logits((2, 4), 40, torch.float32, kernels.device)
    offset = torch.zeros(25, dtype=torch.int64, device=kernels.device)
    launch, part = load(kernels), wide[:, ::2, 5:30]
    assert_close(launch(part, offset, 6), topk_tokens.reference(part, offset, 6))
    assert [x.shape for x in launch(part[:0], offset, 6)] == [(0, 2, 6), (0, 2, 6)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("vocab", [5, 1100])
def test_no_numbers_name_tokens_of_the_vocabulary(kernels, sign, vocab):
    """Some bits of a NaN lie below those of −inf, with which chunks are filled up."""
    logits = torch.full((2, vocab), float("nan"), device=kernels.device).copysign(
        torch.tensor(sign, device=kernels.device)
    )
    logits[1, 3] = 1.0
    offset = torch.zeros(vocab, dtype=torch.int64, device=kernels.device)
    logprob, token = load(kernels)(logits, offset, 4)
    assert ((token >= 0) & (token < vocab)).all() and logprob.isnan().all()
