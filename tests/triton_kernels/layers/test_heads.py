"""Best tokens of draft logits, and with them rank features and rank MLP, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import DraftLogits, lm_and_rank_head
from vllm_specblock.triton_kernels.layers.topk_tokens import topk_tokens


# ---- Best tokens ----
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
def test_best_tokens_as_torch_does(kernels, lead, vocab, width, dtype, sharp, scale):
    logits = distinct_logits(lead, vocab, dtype, kernels.device)
    offset = None if sharp else torch.randint(0, 50, (vocab,), device=kernels.device)
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


# ---- Ranks: two launches, or the loop ----
HIDDEN, CLASSES, SIZE = 40, 7, 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of log-probabilities and rank logits


def rank_head(dtype, device, features_only=False):
    head = nn.Sequential(
        nn.Linear(SIZE + 15, HIDDEN, bias=False), nn.SiLU(), nn.Linear(HIDDEN, CLASSES, bias=False)
    ).to(device, dtype)
    with torch.no_grad():
        head[0].weight[:, :SIZE] *= not features_only
        head[0].weight[:, SIZE:] *= 2
        head[2].weight *= 8
    return head


def inputs(rows, vocab, dtype, device, spread=3.0):
    torch.manual_seed(rows + vocab)
    normed = torch.randn(*rows_of(rows), SIZE)
    # Distributions from sharp to flat: features that say something.
    sharp = torch.linspace(0.1, spread, rows)[:, None]
    logits = (torch.randn(rows, vocab) * sharp).view(*rows_of(rows), vocab)
    offset = torch.randint(0, 50, (vocab,))
    return normed.to(device, dtype), logits.to(device, dtype), offset.to(device)


def rows_of(rows):
    return (rows // 2, 2)


def chosen_is_best(bucket, normed, logits, head, scope, tolerance):
    """Rank logits of the bucket, by the reference: at most `tolerance` below the best."""
    fed = []
    hook = head[2].register_forward_hook(lambda module, args, out: fed.append(out.float()))
    offset = torch.zeros_like(logits[0, 0]).long()
    lm_and_rank_head.reference(DraftLogits(normed, logits, offset, head, 1, scope))
    hook.remove()
    mine = fed[0].gather(-1, bucket[..., None])[..., 0]
    return bool((mine >= fed[0].amax(-1) - tolerance).all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "width", "scope"),
    [(2, 10, 10, 20), (4, 77, 3, 10), (2, 1500, 10, 20), (2, 1030, 4, None), (2, 300, 33, 12)],
)
@pytest.mark.parametrize("sharp", [False, True], ids=["as drafted", "sharpened"])
@torch.no_grad()
def test_ranks_as_torch_does(forms, rows, vocab, width, scope, dtype, sharp):
    normed, logits, offset = inputs(rows, vocab, dtype, forms.device)
    head = rank_head(dtype, forms.device)
    launch = forms.load("lm_and_rank_head").lm_and_rank_head_triton
    beta = torch.linspace(2.5, 0.4, len(logits), device=forms.device) if sharp else None
    given = DraftLogits(normed, logits, offset, head, width, scope, beta)
    logprob, token, bucket = launch(given)
    every = logits.float() if beta is None else logits.float() * beta[:, None, None]
    best, index = every.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    wanted = lm_and_rank_head.reference(given)
    torch.testing.assert_close(logprob, wanted[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logprob, best[..., :width], atol=1e-4, rtol=1e-5)
    assert torch.equal(token, (index + offset[index])[..., :width])
    assert bucket.dtype == torch.int64 and bucket.shape == rows_of(rows)
    assert chosen_is_best(bucket, normed, logits, head, scope, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("numbers", "vocab", "width", "scope"),
    [(range(15), 64, 25, 20), ([0, 11, 14], 1100, 1, None)],
    ids=["scope", "full, two chunks"],
)
@torch.no_grad()
def test_each_rank_feature_to_a_thousandth(forms, numbers, vocab, width, scope):
    """Two rows per feature: its value against a threshold just below it and just above."""
    device, apart, count = forms.device, 1e-3, len(numbers)
    _, logits, offset = inputs(2 * count, vocab, torch.float32, device, spread=2.0)
    head = rank_head(torch.float32, device)
    seen = []
    hook = head[0].register_forward_hook(lambda module, args, out: seen.append(args[0]))
    normed = torch.zeros(count, 2, SIZE, device=device)
    lm_and_rank_head.reference(given := DraftLogits(normed, logits, offset, head, width, scope))
    hook.remove()
    row, number = torch.arange(count, device=device), torch.tensor(numbers, device=device)
    value = seen[0][row, :, SIZE + number]  # [count, 2]
    # Unit i is 30 + feature i in the rows of feature i (where SiLU is linear), else 0; unit 15
    # is 30 + the threshold.
    normed[row, :, number] = 60
    normed[..., 15] = value + torch.tensor([-apart, apart], device=device)
    normed[..., 16] = 30
    first, second = head[0].weight.zero_(), head[2].weight.zero_()
    first[number, number] = 1
    first[number, 16] = -1
    first[number, SIZE + number] = 1
    first[15, 15] = first[15, 16] = 1
    second[0, :15] = second[1, 15] = 1
    launch = forms.load("lm_and_rank_head").lm_and_rank_head_triton
    bucket = launch(given)[2]
    assert bucket.tolist() == [[0, 1]] * count


@torch.no_grad()
def test_ranks_of_no_rows(kernels):
    normed, logits, offset = inputs(2, 64, torch.float32, kernels.device)
    head = rank_head(torch.float32, kernels.device)
    launch = kernels.load("lm_and_rank_head").lm_and_rank_head_triton
    found = launch(DraftLogits(normed[:0], logits[:0], offset, head, 4, 10))
    assert [tuple(x.shape) for x in found] == [(0, 2, 4), (0, 2, 4), (0, 2)]
