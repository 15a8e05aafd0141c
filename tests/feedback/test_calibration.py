"""β: what it is at each temperature, and that it goes where trees keep their promise."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.feedback.calibration import GREEDY, RATES, SAMPLING, DraftCalibration

HEAT = torch.tensor([0.0, 0.2, 0.8, 1.0, 2.0])


def test_before_anything_was_seen():
    """A hot target is flatter than its drafter, a cool one sharper, none more than a greedy one."""
    wanted = [GREEDY, GREEDY, SAMPLING / 0.8, SAMPLING, SAMPLING / 2]
    assert DraftCalibration("cpu").of(HEAT).tolist() == pytest.approx(wanted)


def serve(calibration, temperature, right, steps=1000, requests=4, seed=0):
    """Drafters that are certain of their order, but name probabilities p^(1/right).

    Every tree is a chain of 4 nodes, each of whose tokens is right with probability 0.8 given
    that those before are. The drafter says q for the token and (1 − q) for another, so that at
    β = `right` its scores are the truth.
    """
    draw = torch.Generator().manual_seed(seed)
    truth = torch.tensor([0.8, 0.2])
    said = (truth.log() / right).log_softmax(0)
    for _ in range(steps):
        beta = calibration.of(temperature.expand(requests))
        score = (said * beta[:, None]).log_softmax(1)[:, :1] * torch.arange(1, 5)
        hit = torch.rand(requests, 4, generator=draw) < truth[0]
        accepted = hit.int().cumprod(1).sum(1)
        live = torch.rand(requests, generator=draw) < 0.8
        expected = torch.where(live, score.exp().sum(1), float("nan"))
        calibration.learn(temperature.expand(requests), expected, accepted, live)
    return float(calibration.of(temperature.view(1)))


@pytest.mark.parametrize("right", [0.7, 1.0, 2.2])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_scores_come_to_add_up_to_what_is_accepted(temperature, right):
    calibration = DraftCalibration("cpu")
    if temperature:  # a greedy target bounds the others, and here it is known to be sharp
        serve(calibration, torch.tensor(0.0), 3.0)
    found = serve(calibration, torch.tensor(temperature), right)
    assert found == pytest.approx(right, rel=0.15)


@pytest.mark.parametrize(("heat", "moves"), [(0.0, 0), (1.0, 1), (0.1, 0)])
def test_greedy_and_sampling_requests_do_not_learn_from_each_other(heat, moves):
    """At a temperature near 0 the greedy target's β is used."""
    calibration = DraftCalibration("cpu")
    before = calibration.log.clone()
    heats, live = torch.full((3,), heat), torch.ones(3).bool()
    calibration.learn(heats, torch.ones(3), torch.full((3,), 5), live)
    assert calibration.log[moves] > before[moves] and calibration.trees[moves] == 3
    assert calibration.log[1 - moves] == before[1 - moves] and calibration.trees[1 - moves] == 0


def test_it_stays_within_its_range():
    calibration = DraftCalibration("cpu")
    all_live = torch.ones(64).bool()
    for heat in (0.0, 1.0):
        for accepted, bound in ((60, 4.0), (0, 0.25)):
            for _ in range(400):
                calibration.learn(
                    torch.full((64,), heat), torch.ones(64), torch.full((64,), accepted), all_live
                )
            assert float(calibration.of(torch.tensor([heat]))) == pytest.approx(bound, rel=1e-4)


def test_a_request_learns_a_factor_of_its_own():
    """Two of them, of which one accepts everything and the other nothing."""
    calibration, req_idx = DraftCalibration("cpu", num_slots=4), torch.tensor([2, 0])
    heat, live = torch.zeros(2), torch.ones(2).bool()
    for _ in range(30):
        calibration.learn(heat, torch.ones(2), torch.tensor([4, 0]), live, req_idx)
    usual = calibration.of(torch.zeros(1))
    one, other = calibration.of(heat, req_idx)
    assert one > 1.5 * usual and other < usual / 1.2
    assert calibration.of(torch.zeros(1), torch.tensor([1])) == usual  # an unused slot

    calibration.begin(2)
    assert calibration.of(heat, req_idx).tolist() == pytest.approx([float(usual), float(other)])
    calibration.forget()
    assert calibration.of(heat, req_idx).tolist() == pytest.approx([GREEDY, GREEDY])


def test_a_factor_stays_within_its_range_and_counts_live_trees():
    calibration, req_idx = DraftCalibration("cpu", num_slots=2), torch.tensor([0, 1])
    accepted, live = torch.tensor([60, 60]), torch.tensor([True, False])
    for _ in range(400):
        calibration.learn(torch.ones(2), torch.ones(2), accepted, live, req_idx)
    assert calibration.own.exp().tolist() == pytest.approx([4.0, 1])
    assert calibration.own_trees.tolist() == [RATES.own_memory, 0]
