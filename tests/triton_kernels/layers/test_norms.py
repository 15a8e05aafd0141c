"""Norms with a sum before them, or another beside them, against torch."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (3, 4, 40), (5, 33), (2, 3, 2049), (0, 4, 16)], ids=str
)
@torch.no_grad()
def test_sum_and_norm(kernels, shape, dtype):
    torch.manual_seed(sum(shape))
    left, right = (states(*shape, dtype=dtype, device=kernels.device) for _ in range(2))
    norm = norm_over(shape[-1], dtype, kernels.device)
    launch = kernels.load("norms").add_norm_triton
    assert_same(launch(left, right, norm), add_norm.reference(left, right, norm), dtype)


@pytest.mark.parametrize(("places", "kept"), [((), [6, 0, 2]), ((4,), []), ((4,), [5] * 9)])
@torch.no_grad()
def test_sum_of_kept_rows(kernels, kept, places):
    """`left` is half of a wider tensor, and `keep` the column of a table."""
    torch.manual_seed(len(kept))
    left = states(7, *places, 48, device=kernels.device)[..., 24:]
    right = states(len(kept), *places, 24, device=kernels.device)
    table = torch.ones(len(kept), 3, dtype=torch.int64, device=kernels.device)
    table[:, 1] = torch.tensor(kept, dtype=torch.int64)
    norm = norm_over(24, torch.float32, kernels.device)
    given = left, right, norm, table[:, 1]
    launch = kernels.load("norms").add_norm_triton
    assert_same(launch(*given), add_norm.reference(*given))


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


@torch.no_grad()
def test_broadcast_and_strided_sum(kernels):
    """One summand per row, the other per position; and columns far apart."""
    launch = kernels.load("norms").add_norm_triton
    norm = norm_over(24, torch.float32, kernels.device)
    row, query = (states(n, 24, device=kernels.device) for n in (5, 3))
    apart = states(24, 3, 5, device=kernels.device).permute(2, 1, 0)
    for left, right in ((row[:, None], query[None]), (query[None], row[:, None]), (apart, apart)):
        assert_same(launch(left, right, norm), add_norm.reference(left, right, norm))


def test_needed_gradients_and_other_dtypes_take_the_reference(kernels):
    # On CUDA the kernels have no backward, and read one dtype.
    x = states(3, 2, 16, device=kernels.device).requires_grad_()
    norm = norm_over(16, torch.float32, kernels.device)
    assert all(found.grad_fn for found in (*add_norm(x, x, norm), norm_pair(x, x, norm, norm)))
    with torch.no_grad():
        assert add_norm(x.half(), x, norm)[0].dtype == torch.float32
        assert norm_pair(x.half(), x, norm, norm).dtype == torch.float32
