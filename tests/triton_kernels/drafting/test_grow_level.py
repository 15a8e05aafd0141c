"""EAGLE-2's growth in one launch per level, held bit for bit to torch."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.drafted_blocks import few_examples
from support.tensors import assert_equal, on
from vllm_specblock.triton_kernels.drafting.grow_level import LevelLimits, NextRows

from vllm_specblock.drafters.eagle3.growth import Levels
from vllm_specblock.tree import DraftTree


def a_level(draw: torch.Generator, coarse: bool, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [..., k], best first, and distinct tokens.

    Coarse ones lie on a grid: ties are everywhere, some tokens are certain, by rounding a little
    more than that, and some impossible.
    """
    if coarse:
        logprob = torch.randint(0, 8, shape, generator=draw).sort(dim=-1).values / -8
        logprob = torch.where(logprob < -0.8, float("-inf"), logprob)
        logprob = torch.where(logprob == 0, 1e-6, logprob)
    else:
        logprob = -3 * torch.rand(shape, generator=draw).sort(dim=-1).values
    return logprob, torch.rand(*shape[:-1], 50, generator=draw).argsort(-1)[..., : shape[-1]]


def assert_same(got, wanted, names) -> None:
    assert_equal(*({name: getattr(x, name) for name in names} for x in (got, wanted)))


GROWTHS = st.tuples(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10), st.integers(1, 70))
GROWTHS = GROWTHS.map(lambda d: LevelLimits(d[0], d[1], min(d[1], d[2]), d[3]))


@few_examples(12)
@given(GROWTHS, st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
@example(LevelLimits(1, 1, 1, 5), 2, False, 0)
@example(LevelLimits(1, 10, 10, 5), 1, True, 0)
@example(LevelLimits(8, 1, 1, 8), 3, False, 1)
@example(LevelLimits(3, 10, 2, 60), 3, True, 2)  # fewer rows than children
def test_levels_equal_torch(kernels, growth, requests, coarse, seed):
    draw, device = torch.Generator().manual_seed(seed), kernels.device
    kernel = kernels.load("grow_level")
    # A column of a table, as a caller may have it.
    position = torch.randint(0, 10**5, (requests, 3), generator=draw)[:, 1]
    plain = Levels(growth, position)
    fused = kernel.GrowingLevels(growth, on(device, position))
    rows = of_kernel = there = None
    for level in range(1, growth.depth + 1):
        width = growth.width
        if level == 1:
            width = 1
        else:
            assert_same(of_kernel, rows, NextRows._fields)
            there = torch.rand(requests, width, generator=draw) < 0.8
            there = None if level == 3 else there
        said = a_level(draw, coarse, requests, width, growth.top_k)
        rows = plain.attach(rows, there, *said)
        of_kernel = fused.attach(of_kernel, *on(device, (there, *said)))
    assert_same(of_kernel, rows, DraftTree.TENSORS)


def test_no_requests(kernels):
    kernel = kernels.load("grow_level")
    position = torch.zeros(0, dtype=torch.int64, device=kernels.device)
    growing = kernel.GrowingLevels(LevelLimits(2, 3, 3, 6), position)
    token = position.view(0, 1, 1).expand(0, 3, 3)
    rows = growing.attach(None, None, token[:, :1].float(), token[:, :1])
    assert rows.node.shape == (0, 3) and rows.behind.shape == (0,)
    assert growing.attach(rows, None, token.float(), token).token.shape == (0, 6)
