"""The loops between a drafter's products against the torch references they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.layers import layers_numba
from vllm_specblock.triton_kernels.layers.layer_shift import beside_previous
from vllm_specblock.triton_kernels.layers.norms import add_norm
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair_reference

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


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 4, 40), (5, 33), (0, 4, 16)], ids=str)
def test_sum_and_norm(shape, dtype):
    torch.manual_seed(sum(shape))
    left, right = (torch.randn(shape, dtype=dtype) for _ in range(2))
    norm = norm_over(shape[-1], dtype)
    assert layers_numba.runs_loop(left, right, norm.weight)
    found = layers_numba.add_norm_numba(left, right, norm)
    for got, wanted in zip(found, add_norm.reference(left, right, norm)):
        assert_close(got, wanted, dtype)


def test_sum_of_broadcast_states(dtype):
    row, query = torch.randn(5, 1, 48, dtype=dtype), torch.randn(1, 4, 48, dtype=dtype)
    norm = norm_over(48, dtype)
    found = layers_numba.add_norm_numba(row, query, norm)
    for got, wanted in zip(found, add_norm.reference(row, query, norm)):
        assert_close(got, wanted, dtype)


@pytest.mark.parametrize("kept", [[6, 0, 2], [], [5] * 9])
def test_sum_of_kept_rows(kept, dtype):
    """`left` is half of a wider tensor, and `keep` the column of a table."""
    left = torch.randn(7, 4, 48, dtype=dtype)[..., 24:]
    right, norm = torch.randn(len(kept), 4, 24, dtype=dtype), norm_over(24, dtype)
    table = torch.ones(len(kept), 3, dtype=torch.int64)
    table[:, 1] = torch.tensor(kept, dtype=torch.int64)
    found = layers_numba.add_norm_numba(left, right, norm, table[:, 1])
    for got, wanted in zip(found, add_norm.reference(left, right, norm, table[:, 1])):
        assert_close(got, wanted, dtype)


def test_two_norms_side_by_side(dtype):
    left, right = torch.randn(6, 80, dtype=dtype)[:, 40:], torch.randn(6, 40, dtype=dtype)
    norms = norm_over(40, dtype), norm_over(40, dtype)
    got = layers_numba.norm_pair_numba(left, right, *norms)
    assert_close(got, torch.cat([norms[0](left), norms[1](right)], -1), dtype)


def test_norm(dtype):
    x, norm = torch.randn(3, 4, 72, dtype=dtype), norm_over(72, dtype)
    assert_close(layers_numba.rms_norm_numba(x, norm.weight, norm.eps), norm(x), dtype)


def test_nothing_is_read_of_a_norm_of_zeros():
    x, norm = torch.zeros(1, 8), norm_over(8, torch.float32)
    assert not layers_numba.rms_norm_numba(x, norm.weight, norm.eps).any()


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 4, 40), (2, 3, 7), (0, 4, 8)], ids=str)
def test_states_beside_the_previous_ones(shape, dtype):
    hidden = torch.randn(shape, dtype=dtype)
    assert torch.equal(layers_numba.beside_previous_numba(hidden), beside_previous(hidden))


def test_states_of_layers_side_by_side(dtype):
    states = [torch.randn(9, 2 * 24, dtype=dtype)[:, :24] for _ in range(3)]
    source = torch.tensor([[8, 1], [0, 1], [8, 1], [3, 1]])[:, 0]
    wanted = torch.cat([state[source] for state in states], dim=-1)
    assert torch.equal(layers_numba.gather_states_numba(states, source), wanted)


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
    for got, wanted in zip(found, rotate_pair_reference(query, key, rope, keep, norms)):
        # Each of the two cosines may round the other way.
        torch.testing.assert_close(got, wanted, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
