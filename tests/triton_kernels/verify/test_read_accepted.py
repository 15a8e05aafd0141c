"""One launch reads of the last verdicts what the torch description reads."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.commit.accepted_paths import read_accepted

NAMES = ("path", "accepted", "query_start", "drafts")


def some_requests(count: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Requests of every kind in any slots; the flags are numbers, as a graph has them."""
    torch.manual_seed(count + depth)
    slots = count + 3
    base, run = torch.randint(1, 9, (count,)), torch.randint(0, 60, (count,))
    return (
        torch.randperm(slots)[:count],
        torch.randint(0, 3, (count,)),
        torch.nn.functional.pad((base + run).cumsum(0), (1, 0)).int(),
        base,
        torch.randint(0, 61, (slots, depth + 1)),
        torch.randint(0, depth + 1, (slots,), dtype=torch.int32),
    )


def column(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values between others that would not do."""
    table = torch.full((len(x), 3), 1 << 30, device=device).to(x.dtype)
    table[:, 1] = x.to(device)
    return table[:, 1]


@pytest.mark.parametrize("count", [0, 1, 3, 200])
@pytest.mark.parametrize("depth", [0, 1, 12, 255])
@pytest.mark.parametrize("form", ["eager", "graph"])
def test_as_torch_reads(kernels, count, depth, form):
    req_idx, live, row_start, base, path, accepted = some_requests(count, depth)
    expected = read_accepted(req_idx, live, row_start, base, path, accepted)
    if form == "eager":
        own = (req_idx.int(), live.bool(), base)
        req_idx, live, base = (x.to(kernels.device) for x in own)
    else:
        req_idx, live, base = (column(x, kernels.device) for x in (req_idx, live, base))
    tables = (x.to(kernels.device) for x in (path, accepted))
    launch = kernels.load("read_accepted").read_accepted_triton
    found = launch(req_idx, live, row_start.to(kernels.device), base, *tables)
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.cpu(), theirs), name
    drafts = expected[-1]
    assert count < 200 or ((drafts == 0).any() and (drafts > 0).any())
