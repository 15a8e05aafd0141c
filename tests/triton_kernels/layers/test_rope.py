"""One launch norms and rotates queries and keys as the torch description of it does."""

from __future__ import annotations

import math

import pytest
import torch
from support.tensors import column
from torch import nn
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair

# The interpreter truncates where it should round to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def rope_of(base, places, size, dtype):
    """The angles of T rows, with and without their table."""
    frequency = 0.7 ** torch.arange(size // 2, device=base.device)
    turn = torch.cat([-frequency, frequency])
    angle = (base[:, None] + torch.arange(places, device=base.device))[..., None, None] * turn
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    return Rope(base, turn, None), Rope(base, turn, table)


def inputs(lead, heads, kv_heads, size, dtype, device):
    """query, key, and the two ropes; each row stands somewhere else."""
    torch.manual_seed(sum(lead) + heads + size)
    query, key = torch.randn(*lead, heads, size), torch.randn(*lead, kv_heads, size)
    base = torch.randint(5000, (lead[0],)).to(device)
    ropes = rope_of(base, math.prod(lead[1:]), size, dtype)
    return query.to(device, dtype), key.to(device, dtype), *ropes


def norms_over(size, dtype, device):
    torch.manual_seed(size)
    found = [nn.RMSNorm(size, 1e-2, device=device, dtype=dtype) for _ in range(2)]
    for norm in found:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    return found


def assert_same(got, wanted, dtype=torch.float32, factor=1):
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape and mine.is_contiguous()
        tolerance = {"atol": TOLERANCE[dtype] * factor, "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize(
    ("normed", "dtype"),
    [(False, torch.float16), (True, torch.bfloat16), (True, torch.float32)],
    ids=["plain", "normed", "normed, fp32"],
)
@pytest.mark.parametrize(
    ("lead", "heads", "kv_heads", "size", "kept"),
    [
        ((0, 3), 4, 2, 16, None),
        ((1, 1), 1, 1, 2, None),
        ((3, 5), 6, 2, 40, None),
        ((2, 4), 40, 8, 128, None),  # several tiles
        ((7,), 2, 9, 96, None),
        # Queries of these rows only, at their own positions, named by a column of a table.
        ((9, 4), 6, 2, 32, [8, 0, 3]),
        ((9,), 6, 2, 32, []),
        ((9,), 6, 2, 32, [5] * 11),
    ],
    ids=str,
)
@torch.no_grad()
def test_as_torch_rotates(kernels, lead, heads, kv_heads, size, kept, dtype, normed):
    query, key, bare, full = inputs(lead, heads, kv_heads, size, dtype, kernels.device)
    keep = None
    if kept is not None:
        keep = column(torch.tensor(kept, dtype=torch.int64, device=kernels.device))
        query = query[keep]
    norms = norms_over(size, dtype, kernels.device) if normed else None
    before = query.clone(), key.clone()
    got = kernels.load("rope").rotate_pair_triton(query, key, bare, keep, norms)
    # A norm leaves numbers of up to 4 or so, which are then rounded twice.
    assert_same(got, rotate_pair(query, key, full, keep, norms), dtype, 4 if normed else 1)
    assert torch.equal(query, before[0]) and torch.equal(key, before[1]), "the inputs are changed"


@pytest.mark.parametrize("lead", [(4, 3), (4,)], ids=str)
@torch.no_grad()
def test_strided_states_and_positions(kernels, lead):
    """Queries and keys as a stacked product leaves them; positions as a column, and a part."""
    launch = kernels.load("rope").rotate_pair_triton
    query, key, bare, full = inputs(lead, 4, 2, 16, torch.float32, kernels.device)
    both = torch.cat([query, key, key], dim=-2).flatten(-2)
    views = (x.unflatten(-1, (-1, 16)) for x in both.split([64, 32, 32], -1)[:2])
    base = column(nn.functional.pad(bare.base, (1, 0)))[1:]
    norms = norms_over(16, torch.float32, kernels.device)
    got = launch(*views, bare._replace(base=base), None, norms)
    assert_same(got, rotate_pair(query, key, full, None, norms), factor=2)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_far_positions_keep_their_angle(kernels, theta):
    """Unit vectors show the angles themselves, up to 128 K tokens and beyond."""
    base = torch.tensor([0, 1, 30_001, 105_616, 131_072, 1_000_003], device=kernels.device)
    frequency = theta ** -(torch.arange(64, device=kernels.device) / 64).float()
    bare = Rope(base, torch.cat([-frequency, frequency]), None)
    unit = torch.cat([torch.ones(64), torch.zeros(64)]).expand(6, 1, 1, 128).to(kernels.device)
    turned, _ = kernels.load("rope").rotate_pair_triton(unit, unit, bare)
    angle = (base[:, None].float() * frequency).double()  # rounded as RoPE rounds it
    wanted = torch.cat([angle.cos(), angle.sin()], -1)
    torch.testing.assert_close(turned[:, 0, 0].double(), wanted, atol=2e-7, rtol=0)


def test_a_table_means_the_reference(kernels):
    query, key, _, full = inputs((2, 3), 4, 2, 16, torch.float32, kernels.device)
    turned = rotate_pair(query.requires_grad_(), key.requires_grad_(), full)
    assert all(x.grad_fn for x in turned)
