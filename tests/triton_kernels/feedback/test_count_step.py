"""Counting in one launch, against counting in torch."""

from __future__ import annotations

import pytest
import torch
from support.tensors import column, on
from support.verification import to_be_counted
from vllm_specblock.triton_kernels.feedback.count_step import Drafted

from vllm_specblock.engine.metrics.counters import DrafterCounters

DEPTH = 5


def counted_twice(kernels, drafters: int):
    """Counters by torch, and what counts into them and by the kernel."""
    mine, theirs = DrafterCounters(drafters, kernels.device), DrafterCounters(drafters, "cpu")
    launch = kernels.load("count_step").count_step_triton

    def count(verified, drafted):
        theirs.count(to_be_counted(*verified), drafted)
        origin, *columns, path = verified
        spread = origin, *(column(x, other=1) for x in columns), path
        if drafted is not None:
            drafted = Drafted._make(None if x is None else column(x, other=1) for x in drafted)
        there, drafted = on(kernels.device, (spread, drafted))
        launch(mine.total, to_be_counted(*there), drafted)
        assert mine.total.tolist() == theirs.total.tolist()

    return theirs, count


def some_verified(count: int, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Origins by slot, slots and nodes that were run of a dtype, paths.

    Beyond the nodes that were run an earlier tree's path goes on.
    """
    origin = torch.randint(0, 4, (count + 3, nodes), dtype=torch.uint8)
    run = torch.randint(0, nodes + 1, (count,)) * (torch.rand(count) > 0.3)
    path = torch.randint(0, nodes + 1, (count, DEPTH + 1))
    path[:, 0] = 0
    return origin, torch.randperm(count + 3, dtype=dtype)[:count], run.to(dtype), path


# 2048 places for nodes in a program: 128 requests with 16 of them, 8 with 256.
@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (300, 12), (19, 200), (0, 12)])
@pytest.mark.parametrize("drafters", [1, 2])
def test_as_torch_counts(kernels, count, nodes, drafters):
    theirs, into = counted_twice(kernels, drafters)
    torch.manual_seed(count)
    for beta in (False, True):
        sizes = [torch.randint(0, 3, (count,), dtype=torch.int32) for _ in range(drafters)]
        live, second, agreed = (torch.rand(count) > chance for chance in (0.6, 0.2, 0.4))
        betas = [0.25 + 15 * torch.rand(count), None if beta else torch.rand(count)]
        flags = (live, second, agreed) if drafters == 2 else (live.long(), None, None)
        trees = [x for pair in zip(sizes, betas if beta else reversed(betas)) for x in pair]
        into(some_verified(count, nodes, torch.int32), Drafted(*flags, *trees))
    into(some_verified(count, nodes, torch.int64), None)
    nothing = theirs.total == 0
    assert count < 300 or int(nothing.sum()) == (2 if drafters == 1 else 0)
