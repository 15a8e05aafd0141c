"""One launch rotates queries and keys as the torch description of it does."""

from __future__ import annotations

import math

import pytest
import torch
from vllm_specblock.triton_kernels.rope import rotate_pair, rotate_pair_reference

# The interpreter truncates where it should round to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def inputs(lead, heads, kv_heads, size, dtype, device):
    torch.manual_seed(sum(lead) + heads + size)
    query, key = torch.randn(*lead, heads, size), torch.randn(*lead, kv_heads, size)
    # Unlike halves: a kernel that reads the wrong one shows.
    cos, sin = torch.rand(2, *lead, 1, size)
    return [x.to(device, dtype) for x in (query, key, cos, sin)]


def test_reference_turns_pairs_of_numbers():
    angle = torch.tensor([0.3, -1.1]).view(2, 1, 1).expand(2, 1, 2)  # [T, 1, D]
    state = torch.tensor([2.0, 0.5]).expand(2, 1, 2)
    sin = angle.sin() * torch.tensor([-1.0, 1.0])
    turned, _ = rotate_pair_reference(state, state, angle.cos(), sin)
    for row, by in enumerate([0.3, -1.1]):
        wanted = complex(2, 0.5) * complex(math.cos(by), math.sin(by))
        assert complex(*turned[row, 0].tolist()) == pytest.approx(wanted)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("lead", "heads", "kv_heads", "size"),
    [
        ((1, 1), 1, 1, 2),
        ((3, 5), 6, 2, 40),
        ((2, 4), 40, 8, 128),  # several tiles
        ((7,), 3, 3, 64),
        ((2, 3), 2, 9, 96),
    ],
    ids=str,
)
def test_as_torch_rotates(kernels, lead, heads, kv_heads, size, dtype):
    given = inputs(lead, heads, kv_heads, size, dtype, kernels.device)
    before = [x.clone() for x in given]
    got = kernels.load("rope").rotate_pair_triton(*given)
    for mine, theirs in zip(got, rotate_pair_reference(*given)):
        assert mine.dtype == dtype and mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert all(torch.equal(x, y) for x, y in zip(given, before)), "the inputs are somebody's"


@pytest.mark.parametrize("lead", [(9, 4), (9,)], ids=str)
@pytest.mark.parametrize("kept", [[8, 0, 3], [], [5] * 11])
def test_kept_rows(kernels, lead, kept):
    """Their queries only, at their own positions, named by a column of a table."""
    query, key, cos, sin = inputs(lead, 6, 2, 32, torch.float32, kernels.device)
    table = torch.ones(len(kept), 3, dtype=torch.int64, device=kernels.device)
    table[:, 0] = torch.tensor(kept, dtype=torch.int64)
    keep = table[:, 0]
    given = query[keep], key, cos, sin, keep
    got = kernels.load("rope").rotate_pair_triton(*given)
    for mine, theirs in zip(got, rotate_pair_reference(*given)):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_strided_states_and_no_rows(kernels):
    launch = kernels.load("rope").rotate_pair_triton
    query, key, cos, sin = inputs((4, 3), 4, 2, 16, torch.float32, kernels.device)
    both = torch.cat([query, key], dim=-2)  # as a fused projection leaves them
    got = launch(both[..., :4, :], both[..., 4:, :], cos, sin)
    for mine, theirs in zip(got, rotate_pair_reference(query, key, cos, sin)):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    shapes = [x.shape for x in launch(*(x[:0] for x in (query, key, cos, sin)))]
    assert shapes == [(0, 3, 4, 16), (0, 3, 2, 16)]


def test_a_needed_gradient_takes_the_reference(kernels):
    query, key, cos, sin = inputs((2, 3), 4, 2, 16, torch.float32, kernels.device)
    assert all(
        x.grad_fn for x in rotate_pair(query.requires_grad_(), key.requires_grad_(), cos, sin)
    )
    with torch.no_grad():
        assert not any(x.requires_grad for x in rotate_pair(query, key, cos, sin))
