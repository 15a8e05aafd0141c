"""One launch teaches what the torch description of it teaches."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from support.verification import DEPTH, SPARE_SLOTS, verified_of

from vllm_specblock.feedback.calibration import DraftCalibration


def some_requests(count: int, seed: int) -> list[SimpleNamespace]:
    """Some drafted by one head, some by both, some by none; greedy, cold and hot."""
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


def learn(kernels, calibration: DraftCalibration, verified, drafter: int) -> torch.Tensor:
    """Learn by the kernel -> β."""
    state = calibration.log, calibration.trees, calibration.own, calibration.own_trees
    launch = kernels.load("calibrate_drafts").update_calibration_triton
    return launch(*state, drafter, verified, calibration.rates)


# More requests than the program takes at once: 2048 / 8 nodes.
@pytest.mark.parametrize(
    ("count", "drafter", "apart"), [(1, 0, True), (7, 1, False), (7, 0, True), (300, 1, True)]
)
def test_as_torch_learns(kernels, count, drafter, apart):
    slots = count + SPARE_SLOTS if apart else 0
    mine, theirs = (DraftCalibration(device, slots) for device in (kernels.device, "cpu"))
    for step in range(4):
        requests = some_requests(count, seed=10 * count + step)
        torch.manual_seed(step)
        beta = theirs.learn_from(verified_of(requests), drafter)
        torch.manual_seed(step)
        found = learn(kernels, mine, verified_of(requests, kernels.device), drafter)
        for one, other in ((found, beta), (mine.log, theirs.log), (mine.own, theirs.own)):
            torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=1e-5)
        assert mine.trees.tolist() == theirs.trees.tolist()
        assert mine.own_trees.tolist() == theirs.own_trees.tolist()
    if count > 3:
        assert not apart or 0 < int((theirs.own != 0).sum()) < slots
        assert (theirs.log != DraftCalibration("cpu").log).all(), "nothing was learned"


@pytest.mark.parametrize("accepted", [0, DEPTH])
def test_limits(kernels, accepted):
    """A drafter that is always, or never, right: the end of the range, and no further."""
    mine, theirs = DraftCalibration(kernels.device), DraftCalibration("cpu")
    mine.rates = theirs.rates = mine.rates._replace(lowest=0.1, highest=0.5)
    one = {"origin": [1] * DEPTH, "run": DEPTH, "accepted": accepted, "chance": [0.5] * DEPTH}
    requests = [SimpleNamespace(**one, temperatures=heat) for heat in [0.0, 1.5] * 40]
    for _ in range(3):
        learn(kernels, mine, verified_of(requests, kernels.device), 0)
        theirs.learn_from(verified_of(requests), 0)
    end = pytest.approx([0.5 if accepted else 0.1] * 2)
    assert mine.log.tolist() == end and theirs.log.tolist() == end
