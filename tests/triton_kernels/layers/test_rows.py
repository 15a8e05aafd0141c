"""Norms, sums and RoPE of rows in one launch each, against torch."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.tensors import column
from torch import nn
from vllm_specblock.triton_kernels.layers.norms import add_norm, norm_pair
from vllm_specblock.triton_kernels.layers.rope import Rope, rotate_pair

# The interpreter truncates where it should round to bfloat16.
NORMED = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROTATED = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def norm_over(size, dtype, device, seed=0):
    torch.manual_seed(seed)
    norm = nn.RMSNorm(size, 1e-2).to(device, dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    return norm


def assert_same(got, wanted, tolerance, dtype=torch.float32, factor=1):
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape and mine.is_contiguous()
        near = {"atol": tolerance[dtype] * factor, "rtol": tolerance[dtype]}
        torch.testing.assert_close(mine, theirs, **near)


# ---- Norms ----
def states(*shape, dtype=torch.float32, device="cpu"):
    return (torch.randn(shape) * torch.linspace(-0.3, 2.0, shape[-1])).to(device, dtype)


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


@pytest.mark.parametrize("dtype", NORMED, ids=str)
@pytest.mark.parametrize("case", SUMS)
@torch.no_grad()
def test_sum_and_norm(kernels, case, dtype):
    torch.manual_seed(0)
    left, right, *kept = SUMS[case](partial(states, dtype=dtype, device=kernels.device))
    norm = norm_over(left.shape[-1], dtype, kernels.device)
    keep = [column(torch.tensor(rows, dtype=torch.int64, device=kernels.device)) for rows in kept]
    given = left, right, norm, *keep
    launch = kernels.load("norms").add_norm_triton
    assert_same(launch(*given), add_norm.reference(*given), NORMED, dtype)


@pytest.mark.parametrize("dtype", NORMED, ids=str)
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
    assert_same([launch(*given)], [norm_pair.reference(*given)], NORMED, dtype)


def test_norms_of_needed_gradients_and_other_dtypes_take_the_reference(kernels):
    # On CUDA the kernels have no backward, and read one dtype.
    x = states(3, 2, 16, device=kernels.device).requires_grad_()
    norm = norm_over(16, torch.float32, kernels.device)
    assert all(found.grad_fn for found in (*add_norm(x, x, norm), norm_pair(x, x, norm, norm)))
    with torch.no_grad():
        assert add_norm(x.half(), x, norm)[0].dtype == torch.float32
        assert norm_pair(x.half(), x, norm, norm).dtype == torch.float32


# ---- RoPE ----
def inputs(lead, heads, kv_heads, size, dtype, device):
    """query, key, and the angles without and with their table; each row stands somewhere else."""
    torch.manual_seed(sum(lead) + heads + size)
    query, key = torch.randn(*lead, heads, size), torch.randn(*lead, kv_heads, size)
    base = torch.randint(5000, (lead[0],)).to(device)
    frequency = 0.7 ** torch.arange(size // 2, device=device)
    turn, places = torch.cat([-frequency, frequency]), torch.arange(math.prod(lead[1:])).to(device)
    angle = (base[:, None] + places)[..., None, None] * turn
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    ropes = Rope(base, turn, None), Rope(base, turn, table)
    return query.to(device, dtype), key.to(device, dtype), *ropes


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
    norms = [norm_over(size, dtype, kernels.device, x) for x in range(2)] if normed else None
    before = query.clone(), key.clone()
    got = kernels.load("rope").rotate_pair(query, key, bare, keep, norms)
    # A norm leaves numbers of up to 4 or so, which are then rounded twice.
    wanted = rotate_pair(query, key, full, keep, norms)
    assert_same(got, wanted, ROTATED, dtype, 4 if normed else 1)
    assert torch.equal(query, before[0]) and torch.equal(key, before[1]), "the inputs are changed"


@pytest.mark.parametrize("lead", [(4, 3), (4,)], ids=str)
@torch.no_grad()
def test_strided_states_and_positions(kernels, lead):
    """Queries and keys as a stacked product leaves them; positions as a column, and a part."""
    launch = kernels.load("rope").rotate_pair
    query, key, bare, full = inputs(lead, 4, 2, 16, torch.float32, kernels.device)
    both = torch.cat([query, key, key], dim=-2).flatten(-2)
    views = (x.unflatten(-1, (-1, 16)) for x in both.split([64, 32, 32], -1)[:2])
    base = column(nn.functional.pad(bare.base, (1, 0)))[1:]
    norms = [norm_over(16, torch.float32, kernels.device, x) for x in range(2)]
    got = launch(*views, bare._replace(base=base), None, norms)
    assert_same(got, rotate_pair(query, key, full, None, norms), ROTATED, factor=2)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_far_positions_keep_their_angle(kernels, theta):
    """Unit vectors show the angles themselves, up to 128 K tokens and beyond."""
    base = torch.tensor([0, 1, 30_001, 105_616, 131_072, 1_000_003], device=kernels.device)
    frequency = theta ** -(torch.arange(64, device=kernels.device) / 64).float()
    bare = Rope(base, torch.cat([-frequency, frequency]), None)
    unit = torch.cat([torch.ones(64), torch.zeros(64)]).expand(6, 1, 1, 128).to(kernels.device)
    turned, _ = kernels.load("rope").rotate_pair(unit, unit, bare)
    angle = (base[:, None].float() * frequency).double()  # rounded as RoPE rounds it
    wanted = torch.cat([angle.cos(), angle.sin()], -1)
    torch.testing.assert_close(turned[:, 0, 0].double(), wanted, atol=2e-7, rtol=0)


def test_a_table_means_the_reference(kernels):
    query, key, _, full = inputs((2, 3), 4, 2, 16, torch.float32, kernels.device)
    turned = rotate_pair(query.requires_grad_(), key.requires_grad_(), full)
    assert all(x.grad_fn for x in turned)
