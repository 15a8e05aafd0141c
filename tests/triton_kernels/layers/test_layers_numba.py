"""The loops between a drafter's products against the torch references they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.layers import layers_numba
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # bf16: one step of 2^-8, of sums apart


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def norm_over(size, dtype):
    norm = nn.RMSNorm(size, 1e-2).to(dtype)
    norm.weight.uniform_(0.5, 2.0)
    return norm


def assert_close(got, wanted, dtype):
    assert got.dtype == wanted.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_norm(dtype):
    x, norm = torch.randn(3, 4, 72, dtype=dtype), norm_over(72, dtype)
    assert_close(layers_numba.rms_norm_numba(x, norm.weight, norm.eps), norm(x), dtype)


def test_nothing_is_read_of_a_norm_of_zeros():
    x, norm = torch.zeros(1, 8), norm_over(8, torch.float32)
    assert not layers_numba.rms_norm_numba(x, norm.weight, norm.eps).any()


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("kept", [None, [2, 0], [1, 1, 1, 1, 1]])
def test_rotation(kept, normed, dtype):
    """Queries and keys are parts of one product, as in a layer; positions are far out."""
    rows, K, heads, size = 4, 3, 2, 16
    both = torch.randn(rows, K, 3 * heads * size, dtype=dtype)
    query, key = (part.unflatten(-1, (-1, size)) for part in both.split([4 * size, 2 * size], -1))
    keep = None if kept is None else torch.tensor(kept)
    if kept is not None:
        query = query[keep]
    base = torch.tensor([[5, 0], [131_000, 0], [0, 0], [977, 0]])[:, 0]
    frequency = 1.0 / 10_000 ** (torch.arange(size // 2) / (size // 2))
    turn = torch.cat([-frequency, frequency])
    angle = (base[:, None] + torch.arange(K))[..., None, None] * turn
    rope = Rope(base, turn, (angle.cos().to(dtype), angle.sin().to(dtype)))
    norms = (norm_over(size, dtype), norm_over(size, dtype)) if normed else None
    found = layers_numba.rotate_pair_numba(query, key, base, turn, keep, norms)
    for got, wanted in zip(found, rotate_pair(query, key, rope, keep, norms)):
        # Each of the two cosines may round the other way.
        torch.testing.assert_close(got, wanted, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
