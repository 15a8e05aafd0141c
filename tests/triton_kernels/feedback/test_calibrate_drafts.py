"""One launch, or one loop on a CPU, teaches what the torch description of it teaches."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from support.verification import DEPTH, SPARE_SLOTS, verified_of

from vllm_specblock.feedback.calibration import (
    MEMORY,
    OWN_MEMORY,
    OWN_PRIOR,
    OWN_RANGE,
    PRIOR,
    DraftCalibration,
)


def some_requests(count: int, seed: int) -> list[SimpleNamespace]:
    """Some drafted by one head, some by both, some of nobody; greedy, cold and hot."""
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        size = draw.randint(0, DEPTH)
        run = draw.randint(0, size)
        requests.append(
            SimpleNamespace(
                origin=[draw.randint(1, 3) for _ in range(size)],
                chance=sorted((draw.uniform(0.01, 1) for _ in range(size)), reverse=True),
                run=run,
                accepted=draw.randint(0, run),
                temperatures=draw.choice([0.0, 0.3, 0.7, 1.0, 1.7]),
            )
        )
    # Placeholders of the scheduler.
    requests[0] = SimpleNamespace(origin=[], chance=[], run=3, accepted=2, temperatures=0.0)
    return requests


@pytest.fixture
def form(forms):
    """What learns, and where."""
    learn = forms.load("calibrate_drafts").update_calibration_triton
    return SimpleNamespace(learn=learn, device=forms.device)


def launch_of(form, sharpness, verified, head):
    form.learn(
        sharpness.log,
        sharpness.trees,
        head,
        verified,
        sharpness._limits,
        PRIOR,
        MEMORY,
        sharpness.own,
        sharpness.own_trees,
        OWN_RANGE,
        OWN_PRIOR,
        OWN_MEMORY,
    )


# More requests than the program takes at once: 2048 / 8 nodes.
@pytest.mark.parametrize("count", [1, 3, 7, 300])
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("apart", [True, False])
def test_as_torch_learns(form, count, head, apart):
    slots = count + SPARE_SLOTS if apart else 0
    mine, theirs = DraftCalibration(form.device, slots), DraftCalibration("cpu", slots)
    for step in range(4):
        requests = some_requests(count, seed=10 * count + step)
        torch.manual_seed(step)
        verified = verified_of(requests)
        theirs.learn_from(verified, head)
        torch.manual_seed(step)
        launch_of(form, mine, verified_of(requests, form.device), head)
        torch.testing.assert_close(mine.log.cpu(), theirs.log, atol=1e-6, rtol=1e-5)
        assert mine.trees.tolist() == theirs.trees.tolist()
        torch.testing.assert_close(mine.own.cpu(), theirs.own, atol=1e-6, rtol=1e-5)
        assert mine.own_trees.tolist() == theirs.own_trees.tolist()
    if count > 3:
        assert not apart or 0 < int((theirs.own != 0).sum()) < slots
        assert (theirs.log != DraftCalibration("cpu").log).all(), "nothing was learned"


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_as_torch_says(kernels, count):
    """β at temperature 0, below where both meet, and above."""
    sharpness = DraftCalibration("cpu", count + 1)
    sharpness.own.copy_(torch.linspace(-1, 1, count + 1))
    sharpness.log.copy_(torch.tensor([0.7, -0.2]))
    temperatures = torch.tensor([0.0, 1.3, 0.05, 0.4, 0.9]).repeat(count // 5 + 1)[:count]
    table = torch.full((count, 3), float("nan"), device=kernels.device)
    table[:, 1] = temperatures
    beta = kernels.load("calibrate_drafts").calibration_triton
    log, own = sharpness.log.to(kernels.device), sharpness.own.to(kernels.device)
    req_idx = torch.randperm(count + 1)[:count]
    columns = torch.stack([req_idx - 9, req_idx, req_idx + 9], 1).to(kernels.device)
    for given in (temperatures.to(kernels.device), table[:, 1]):
        for where in (None, req_idx.int().to(kernels.device), columns[:, 1]):
            found = beta(log, given, own, where).cpu()
            wanted = sharpness.of(temperatures, None if where is None else req_idx)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted, atol=0, rtol=1e-6)
    assert count < 3 or len(set(found.tolist())) > 1


@pytest.mark.parametrize("accepted", [0, DEPTH])
def test_limits(form, accepted):
    """A head that is always, or never, right: the end of the range, and no further."""
    sharpness, other = DraftCalibration(form.device), DraftCalibration("cpu")
    sharpness._limits = other._limits = (0.1, 0.5)
    one = {"origin": [1] * DEPTH, "run": DEPTH, "accepted": accepted, "chance": [0.5] * DEPTH}
    requests = [
        SimpleNamespace(**one, temperatures=temperatures) for temperatures in [0.0, 1.5] * 40
    ]
    for _ in range(3):
        verified = verified_of(requests, form.device)
        launch_of(form, sharpness, verified, 0)
        other.learn_from(verified_of(requests), 0)
    end = 0.5 if accepted else 0.1
    assert sharpness.log.tolist() == pytest.approx([end, end])
    assert other.log.tolist() == pytest.approx([end, end])
