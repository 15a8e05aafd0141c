"""Lazy routing's two launches decide and learn as torch does."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels.verify.verification_result import VerificationResult

from vllm_specblock.combine.route import confidence
from vllm_specblock.feedback.lazy_gate import LazyGate
from vllm_specblock.tree import DraftTree

SLOTS = 150


def column(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values between others."""
    table = torch.ones(len(x), 3, dtype=x.dtype, device=device)
    table[:, 1] = x.to(device)
    return table[:, 1]


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("count", [0, 1, 6, 140])
def test_learns_as_torch(kernels, count, how):
    launch = kernels.load("lazy_gate").learn_gate_triton
    torch.manual_seed(count)
    theirs, mine = LazyGate("cpu", how, decay=0.9), LazyGate(kernels.device, how, decay=0.9)
    thresholds = set()
    for turn in range(12):
        req_idx = torch.randperm(SLOTS)[:count]
        # In the middle of the buckets: logarithms may differ at their edges.
        sure = 2.0 ** ((torch.randint(-18, 10, (SLOTS,)) + 0.5) / 2)
        sure = torch.where(torch.rand(SLOTS) < 0.1, 0.0, sure)
        both = torch.rand(SLOTS) < 0.5
        num_run = torch.randint(0, 3, (count,)) * (turn % 4 != 3)  # now and then nobody
        origin = (torch.rand(SLOTS, 5) < 0.8).to(torch.uint8)
        accepted = torch.randint(0, 9, (count,), dtype=torch.int32)
        live = (num_run > 0) & (origin[req_idx, 0] > 0)
        theirs.learn(sure[req_idx], both[req_idx], accepted, live)
        sure[req_idx[~live]] = float("nan")  # nobody may look
        columns = (column(x, kernels.device) for x in (req_idx, num_run, accepted))
        result = VerificationResult(*columns, None, None, origin.to(kernels.device), None)
        launch(mine.state, sure.to(kernels.device), both.to(kernels.device), result)
        torch.testing.assert_close(mine.steps.cpu(), theirs.steps)
        torch.testing.assert_close(mine.accepted.cpu(), theirs.accepted)
        assert mine.threshold.item() == theirs.threshold.item()
        thresholds.add(mine.threshold.item())
    assert len(thresholds) > 1 or count < 6, "the threshold never moved"


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize(("count", "slots"), [(1, 12), (7, 60), (40, 256)])
def test_wants_as_torch(kernels, count, slots, how):
    launch = kernels.load("lazy_gate").most_want_triton
    torch.manual_seed(count)
    gate = LazyGate(kernels.device, how)
    step = torch.zeros(1, dtype=torch.int64, device=kernels.device)
    seen = set()
    for turn in range(24):
        size = torch.randint(0, slots + 1, (count,), dtype=torch.int32)
        fall = -torch.rand(count, slots).cumsum(1) * torch.rand(count, 1)
        fall = torch.where(torch.arange(slots) < size[:, None], fall, float("-inf"))
        tree = DraftTree.chain(torch.zeros(count, slots).long(), fall, size)
        gate.threshold.fill_(turn % 17)
        req_idx = torch.randperm(SLOTS)[:count]
        sure = torch.full((SLOTS,), 9.0, device=kernels.device)
        both = torch.zeros(SLOTS, dtype=torch.bool, device=kernels.device)
        want = launch(
            gate.state,
            fall.to(kernels.device),
            size.to(kernels.device),
            how == "mean",
            step,
            turn % 2 == 0,
            column(req_idx, kernels.device),
            sure,
            both,
        )
        assert step.item() == turn + 1
        known = confidence(tree, how)
        torch.testing.assert_close(sure.cpu()[req_idx], known)
        assert (both.cpu()[req_idx] == (turn % 2 == 0)).all() and both.sum() == count * (
            turn % 2 == 0
        )
        assert (sure.cpu() == 9).sum() >= SLOTS - count
        reference = LazyGate("cpu", how)
        reference.threshold.fill_(turn % 17)
        wanted = reference.wants(known, torch.full((count,), turn + 1))
        assert want.item() == (2 * wanted.sum() >= count).item()
        seen.add(want.item())
    assert len(seen) == 2


def test_keys_explore_as_in_torch(kernels):
    """All requests are sure of their trees and the second head is never worth it."""
    launch = kernels.load("lazy_gate").most_want_triton
    gate, reference = LazyGate(kernels.device), LazyGate("cpu")
    gate.threshold.fill_(0)
    reference.threshold.fill_(0)
    step = torch.zeros(1, dtype=torch.int64, device=kernels.device)
    fall = torch.zeros(3, 4, device=kernels.device)
    size = torch.full((3,), 4, dtype=torch.int32, device=kernels.device)
    sure, both = fall.new_zeros(3), size > 9
    found = [
        launch(gate.state, fall, size, True, step, False, size.new_tensor([2, 0, 1]), sure, both)
        for _ in range(64)
    ]
    wanted = reference.wants(torch.ones(64), torch.arange(1, 65))
    assert torch.cat(found).tolist() == wanted.tolist() and 0 < wanted.sum() < 12
