"""Norms with a sum before them, or another beside them, against torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.tensors import column
from torch import nn
from vllm_specblock.triton_kernels.layers.norms import add_norm, norm_pair

# The interpreter truncates where it should round to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def norm_over(size, dtype, device, seed=0):
    torch.manual_seed(seed)
    norm = nn.RMSNorm(size, 1e-2).to(device, dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    return norm


def states(*shape, dtype=torch.float32, device="cpu"):
    return (torch.randn(shape) * torch.linspace(-0.3, 2.0, shape[-1])).to(device, dtype)


def assert_same(got, wanted, dtype=torch.float32):
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype and mine.is_contiguous()
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


SHAPES = [(1, 1, 2), (3, 4, 40), (5, 33), (2, 3, 2049), (0, 4, 16)]
SUMS = {
    **{str(shape): lambda x, shape=shape: (x(*shape), x(*shape)) for shape in SHAPES},
    # `left` is half of a wider tensor.
    "kept rows": lambda x: (x(7, 48)[..., 24:], x(3, 24), [6, 0, 2]),
    "no kept rows": lambda x: (x(7, 4, 48)[..., 24:], x(0, 4, 24), []),
    "a row kept often": lambda x: (x(7, 4, 48)[..., 24:], x(9, 4, 24), [5] * 9),
    "of rows and positions": lambda x: (x(5, 24)[:, None], x(3, 24)[None]),
    "of positions and rows": lambda x: (x(3, 24)[None], x(5, 24)[:, None]),
    "columns far apart": lambda x: [x(24, 3, 5).permute(2, 1, 0)] * 2,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", SUMS)
@torch.no_grad()
def test_sum_and_norm(kernels, case, dtype):
    torch.manual_seed(0)
    left, right, *kept = SUMS[case](partial(states, dtype=dtype, device=kernels.device))
    norm = norm_over(left.shape[-1], dtype, kernels.device)
    keep = [column(torch.tensor(rows, dtype=torch.int64, device=kernels.device)) for rows in kept]
    given = left, right, norm, *keep
    launch = kernels.load("norms").add_norm_triton
    assert_same(launch(*given), add_norm.reference(*given), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [None, [6, 0, 2, 2]])
@torch.no_grad()
def test_norms_side_by_side(kernels, rows, dtype):
    """The left one of rows in any order; the right one is a part of a wider tensor."""
    left = states(7 if rows else 4, 24, dtype=dtype, device=kernels.device)
    right = states(4, 48, dtype=dtype, device=kernels.device)[:, 24:]
    pair = [norm_over(24, dtype, kernels.device, seed) for seed in range(2)]
    chosen = None if rows is None else torch.tensor(rows, device=kernels.device)
    given = left, right, *pair, chosen
    launch = kernels.load("norms").norm_pair_triton
    assert_same([launch(*given)], [norm_pair.reference(*given)], dtype)


def test_needed_gradients_and_other_dtypes_take_the_reference(kernels):
    # On CUDA the kernels have no backward, and read one dtype.
    x = states(3, 2, 16, device=kernels.device).requires_grad_()
    norm = norm_over(16, torch.float32, kernels.device)
    assert all(found.grad_fn for found in (*add_norm(x, x, norm), norm_pair(x, x, norm, norm)))
    with torch.no_grad():
        assert add_norm(x.half(), x, norm)[0].dtype == torch.float32
        assert norm_pair(x.half(), x, norm, norm).dtype == torch.float32
