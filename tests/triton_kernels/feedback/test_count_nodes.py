"""Counting in one launch, against counting in torch."""

from __future__ import annotations

import pytest
import torch
from support.verification import to_be_counted

from vllm_specblock.engine.metrics.counters import DrafterCounters

DEPTH = 5


def column(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values between others that would count."""
    table = torch.ones(len(x), 3, dtype=x.dtype, device=device)
    table[:, 1] = x.to(device)
    return table[:, 1]


def wide(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values as the front of longer rows that would count."""
    return torch.nn.functional.pad(x, (0, 3), value=1).to(device)[:, : x.shape[1]]


def of_kernel(kernels, counters: DrafterCounters):
    """Both counts of `counters`, from the kernels."""
    launch = kernels.load("count_nodes")
    return (
        lambda *args: launch.count_verified_triton(counters._nodes, to_be_counted(*args)),
        lambda *args: launch.count_drafted_triton(counters._drafts, *args),
    )


# 2048 places for nodes in a program: 128 requests with 16 of them, 8 with 256.
@pytest.mark.parametrize(
    ("count", "nodes"), [(1, 12), (3, 1), (7, 60), (300, 12), (19, 200), (0, 12)]
)
def test_verified_as_torch_counts(kernels, count, nodes):
    mine, theirs = (
        DrafterCounters(2, nodes, DEPTH, kernels.device),
        DrafterCounters(2, nodes, DEPTH, "cpu"),
    )
    verified, _ = of_kernel(kernels, mine)
    torch.manual_seed(count)
    for _ in range(3):
        origin = torch.randint(0, 4, (count + 3, nodes), dtype=torch.uint8)
        req_idx = torch.randperm(count + 3)[:count]
        scheduled = torch.randint(0, nodes + 1, (count,)) * (torch.rand(count) > 0.3)
        # Beyond what was scheduled a path is that of an earlier tree.
        path = torch.randint(0, nodes + 1, (count, DEPTH + 1))
        path[:, 0] = 0
        theirs.verified(to_be_counted(origin, req_idx, scheduled, path))
        device = kernels.device
        columns = (column(x, device) for x in (req_idx, scheduled))
        verified(wide(origin, device), *columns, wide(path, device))
        assert mine.total.tolist() == theirs.total.tolist()
    assert (theirs._nodes > 0).all() or count < 7, "nothing was counted"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 5, 256, 700])
def test_drafted_as_torch_counts(kernels, count, heads):
    mine, theirs = DrafterCounters(heads, 3, 2, kernels.device), DrafterCounters(heads, 3, 2, "cpu")
    _, drafted = of_kernel(kernels, mine)
    torch.manual_seed(count)
    for _ in range(3):
        sizes = [torch.randint(0, 3, (count,), dtype=torch.int32) for _ in range(heads)]
        second, agreed, live = (torch.rand(count) > chance for chance in (0.2, 0.4, 0.6))
        betas = [0.25 + 15 * torch.rand(count) for _ in range(heads)]
        theirs.drafted(sizes, second, agreed, live, betas)
        columns = (column(x, kernels.device) for x in (*sizes, second, agreed, live))
        ours = [next(columns) for _ in range(heads)], *columns
        drafted(*ours, [column(x, kernels.device) for x in betas])
        assert mine.total.tolist() == theirs.total.tolist()
    assert (theirs._drafts > 0).all() or count < 256, "nothing was counted"
    assert len(set(theirs._drafts.tolist())) > 2 + heads or count < 256, "all the same"


def test_no_second_drafter_and_no_beta(kernels):
    mine, theirs = DrafterCounters(1, 3, 2, kernels.device), DrafterCounters(1, 3, 2, "cpu")
    size, live = torch.tensor([2, 3, 1], dtype=torch.int32), torch.tensor([True, False, True])
    theirs.drafted([size], None, None, live, [None])
    ours = [size.to(kernels.device)], None, None, live.to(kernels.device), [None]
    of_kernel(kernels, mine)[1](*ours)
    assert mine.as_dict() == theirs.as_dict()
    assert mine.as_dict()["drafted_nodes_1"] == 3
    assert mine._drafts.tolist() == [3, 0, 0, 2, 2, 2, 2000]


def test_one_drafter_has_a_beta_and_the_other_none(kernels):
    counters = DrafterCounters(2, 3, 2, kernels.device)
    size = torch.tensor([2, 0, 1, 1], dtype=torch.int32, device=kernels.device)
    live = torch.tensor([True, True, False, True], device=kernels.device)
    beta = torch.tensor([1.7, 9.0, 9.0, 0.3], device=kernels.device)
    for betas in ([beta, None], [None, beta]):
        of_kernel(kernels, counters)[1]([size] * 2, live, live, live, betas)
    assert counters._drafts[-2:].tolist() == [1700 + 300 + 2000] * 2


def test_every_integer_will_do(kernels):
    """The engine's numbers of scheduled nodes are int32 or int64, as its batch has them."""
    for dtype in (torch.int32, torch.int64):
        counters = DrafterCounters(1, 4, 2, kernels.device)
        origin = torch.ones(1, 4, dtype=torch.uint8, device=kernels.device)
        scheduled = torch.full((1,), 3, dtype=dtype, device=kernels.device)
        path = torch.tensor([[0, 2, 0]], device=kernels.device)
        of_kernel(kernels, counters)[0](origin, scheduled * 0, scheduled, path)
        assert counters._nodes.tolist() == [[3, 1, 1], [0, 0, 0], [0, 0, 0]]
