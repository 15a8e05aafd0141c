"""The controller on a simulated server: the short form of `benchmarks/controller.py`."""

from __future__ import annotations

import numpy as np
import pytest
from lib.controller_world import MACHINES, Phase, Trace, World, figures, simulate, traces

from vllm_specblock.feedback.controller import Controller, Step
from vllm_specblock.feedback.step_cost import StepCost

SLOW, FAST = "CPU, SpecBlock", "GPU, n-gram"


class Fixed:
    """Verify every node above a survival; 1: plain decoding."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.steps, self.cost = threshold, [], StepCost()

    def observe(self, step, sampling):
        self.steps.append(step)

    def budget(self, survival, requests, rows, most, sampling, padded):
        assert len(survival) == requests == rows and (np.diff(survival) <= 0).all()
        return int((survival > self.threshold).sum())

    def drafts(self, requests, sampling):
        return self.threshold < 1


def world(name: str, *phases: Phase, **options) -> World:
    return World(MACHINES[name], Trace(phases, **options))


@pytest.mark.parametrize("name", MACHINES)
def test_a_fixed_policy_runs_as_it_was_computed(name):
    """Except for the first step, which has no trees, and estimates that are not yet calibrated."""
    found = world(name, Phase(600, 1))
    run = simulate(found, Fixed(0.0))
    choice = found.choices.index(f"{found.machine.nodes} nodes")
    np.testing.assert_allclose(run.tokens[1:], found.tokens[choice, 1:])
    np.testing.assert_allclose(run.seconds[1:], found.seconds[choice, 1:])
    plain = simulate(found, Fixed(1.0))
    np.testing.assert_allclose(plain.seconds, found.seconds[0])
    assert figures(found, plain)["first"] == pytest.approx(1)


def test_verdicts_agree_with_expected_tokens():
    found = world(FAST, Phase(4000, 4))
    policy = Fixed(0.1)
    run = simulate(found, policy)
    assert np.mean([step.tokens for step in policy.steps]) == pytest.approx(
        run.tokens.mean(), rel=0.03
    )


def test_the_text_gives_the_gain_that_was_asked_for():
    for gain in (1.02, 1.3):
        found = world(SLOW, Phase(600, 4), gain=gain)
        assert figures(found, simulate(found, Fixed(1.0)))["phases"][0]["gain"] == pytest.approx(
            gain, rel=0.01
        )


def test_plain_decoding_has_no_regret_where_it_is_best():
    found = world(SLOW, Phase(600, 4, "random"), Phase(600, 4))
    result = figures(found, simulate(found, Fixed(1.0)))
    assert result["loss"] == pytest.approx(0, abs=1e-6)
    assert result["regret"] > 0.05 and result["back"] == 600


SHORT = [
    (SLOW, "wrong start-up figures"),
    (SLOW, "quiet, batch 8"),
    (SLOW, "plain is best, batch 1"),
    ("AMX, SpecBlock", "start under load"),
    ("GPU, SpecBlock", "noise of factor 3"),
    ("CPU, n-gram", "plain is best, bursts"),
    ("CPU, n-gram", "sampling on and off"),
]


@pytest.mark.parametrize("name, trace", SHORT)
def test_the_controller_meets_its_bars(name, trace):
    found = World(MACHINES[name], traces(500)[trace])
    result = figures(found, simulate(found, Controller(found.machine.nodes)))
    assert result["regret"] <= 0.03 and result["first"] >= 0.97
    assert (result["loss"] or 0) <= 0.01 and (result["back"] or 0) <= 256


def served(survival: float, draft: float, steps: int = 1200) -> list[bool]:
    """One request and one node, at true costs: whether each step drafted."""
    controller, trees, drafted = Controller(1), False, []
    controller.cost.measured({1: 1.0, 2: 1.0, 4: 1.0}, {1: draft})
    for _ in range(steps):
        nodes = controller.budget(np.array([[survival]]), 1, 1) if trees else 0
        drafts = controller.drafts(1)
        tokens = 1 + nodes * survival
        seconds = 1.0 + drafts * draft
        controller.observe(Step(1, 1 + nodes, trees, drafts, tokens, seconds, drafts * draft))
        trees = drafts
        drafted.append(drafts)
    return drafted


def runs(drafted: list[bool]) -> list[int]:
    """Lengths of the runs of equal decisions."""
    ends = np.flatnonzero(np.diff(drafted)) + 1
    return np.diff([0, *ends, len(drafted)]).tolist()


def paused(found: list[int]) -> int:
    """Place of the first long run, a pause."""
    return next(place for place, steps in enumerate(found) if steps > 32)


def test_drafting_pauses_after_a_loss_of_two_steps():
    found = runs(served(0.2, 0.5))  # a gain of 0.8: a fifth of a step lost in each
    assert 9 <= sum(found[: paused(found) : 2]) <= 13


def test_a_pause_ends_with_a_short_probe():
    found = runs(served(0.0, 0.5))
    assert found[paused(found) :][:2] == [224, 4]  # paused, then probing


def test_a_cheap_probe_is_longer():
    found = runs(served(0.0, 0.1))
    assert 12 <= found[paused(found) + 1] <= 18  # 0.007 of 224 steps pay for 15


def test_plain_steps_are_timed_now_and_then():
    found = runs(served(0.9, 0.1))
    assert found[1::2] == [2] * len(found[1::2]) and found[-3] == 255


def test_a_change_of_text_is_seen_after_as_many_trees():
    controller = Controller(1)
    for survival, trees in ((0.9, 256), (0.3, 128)):
        for _ in range(trees):
            controller.budget(np.array([[survival]]), 1, 1)
    known = controller._yields[0]
    assert known.tokens()[-1] / known.correction == pytest.approx(0.6)


def shape_after(times: int, error: float) -> float:
    """Log change of two rows over one, after comparisons of the two with this log error."""
    cost = StepCost()
    cost.measured({1: 1.0, 2: 1.1}, {1: 0.1})
    for turn in range(times + 1):
        level = float(cost.verify(1 + turn % 2, 1))
        cost.observe(1 + turn % 2, 1, True, level * np.exp(error * (turn % 2)))
    return float(np.log(cost.verify(2, 1) / cost.verify(1, 1) / 1.1))


def test_the_shape_takes_over_a_part_of_a_small_error():
    assert shape_after(1, 0.1) == pytest.approx(0.1, rel=0.2)
    late = shape_after(200, 0.01) - shape_after(198, 0.01)
    assert late == pytest.approx(2 * 0.01 * 2 * 0.6 / 25, rel=0.3)


def test_one_outlier_does_not_decide():
    assert shape_after(1, 1.0) == pytest.approx(1.5 * 0.35)
    assert shape_after(1, 3.0) == 0  # the process did something else


def test_more_requests_than_any_size_that_is_kept():
    """Draft costs are kept up to 1,024 requests; more of them cost as much."""
    cost = Controller(12).cost
    for _ in range(3):
        cost.observe_draft(4000, True, cost.draft(4000) / cost.of(1.0), 0)
    assert np.isfinite(cost.draft(4000)) and cost.draft(4000) == cost.draft(1024)
