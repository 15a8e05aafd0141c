"""The controller on a simulated server: the short form of `benchmarks/controller.py`."""

from __future__ import annotations

import numpy as np
import pytest
from lib.controller_world import MACHINES, World, figures, simulate, traces

from vllm_specblock.feedback.controller import PLAIN, Controller, Step
from vllm_specblock.feedback.step_cost import BRIEF, LOOKUP, WHOLE, StepCost

SLOW = "CPU, SpecBlock"


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
    result = figures(found, simulate(found, Controller()))
    assert result["regret"] <= 0.03 and result["first"] >= 0.97
    assert (result["loss"] or 0) <= 0.01 and (result["back"] or 0) <= 256


def served(survival: float, draft: float, steps: int = 1200) -> list[int]:
    """One request and one node, at true costs: lengths of the runs of steps that draft or not."""
    controller, trees, drafted = Controller(), False, []
    controller.cost.measured({1: 1.0, 2: 1.0, 4: 1.0}, {1: draft})
    for _ in range(steps):
        nodes = controller.budget(np.array([[survival]]), 1, 1) if trees else 0
        drafts = controller.drafts(1)
        seconds, accepted = 1.0 + drafts * draft, nodes * survival
        controller.observe(Step(1, 1 + nodes, trees, drafts, accepted, seconds, drafts * draft))
        trees = drafts
        drafted.append(drafts)
    ends = np.flatnonzero(np.diff(drafted)) + 1
    return np.diff([0, *ends, len(drafted)]).tolist()


def paused(found: list[int]) -> list[int]:
    """Lengths of the runs from the first pause on."""
    return found[next(place for place, steps in enumerate(found) if steps > 32) :]


def test_drafting_pauses_after_a_loss_of_two_steps():
    found = served(0.2, 0.5)  # a gain of 0.8: a fifth of a step lost in each
    assert 9 <= sum(found[: -len(paused(found)) : 2]) <= 13


@pytest.mark.parametrize(
    "draft, waits", [(0.1, [67] * 3), (0.3, [201] * 3), (1.0, [224, 4 / 0.006 - 224])]
)
def test_a_pause_ends_with_a_trial_of_four_steps_that_it_has_paid_for(draft, waits):
    """It takes 4 · draft / 0.006 steps; a dear trial comes in time, and then less often."""
    found = paused(served(0.0, draft))
    assert found[1:4:2] == [4, 4]
    assert found[: 2 * len(waits) : 2] == pytest.approx(waits, abs=2)


def test_plain_steps_are_timed_now_and_then():
    found = served(0.9, 0.1)
    assert found[1::2] == [2] * len(found[1::2]) and found[2:-1:2] == [224] * len(found[2:-1:2])
    assert found[0] == 7  # at once, while the gain is uncertain


def test_a_drafter_is_asked_where_it_gains_more_than_it_costs():
    """Beside a lookup of a tenth of its time, while nothing but start-up figures is known."""
    controller = Controller()
    assert controller.asks(0.19, 1, 0) and not controller.asks(0.17, 1, 0)  # 0.2 − 0.02
    controller.cost.read = 0.02
    assert controller.asks(0.21, 1, 64) and not controller.asks(0.19, 1, 64)  # + 0.02


def test_trees_that_do_not_pay_leave_the_next_step_plain():
    controller = Controller()
    controller.cost.measured({1: 1.0, 2: 1.2, 4: 1.6}, {1: 0.1})
    controller.selective = True
    for _ in range(17):
        controller.budget(np.array([[0.1]]), 1, 1)
    assert controller.budget(np.array([[0.21]]), 1, 1) == 1
    assert controller.budget(np.array([[0.19]]), 1, 1) == PLAIN


def test_prompts_wait_for_drafters_where_a_batch_has_no_gain():
    """A node of 0.5 pays beside one request, at 1.4 of a plain step, and not beside four."""
    controller = Controller()
    controller.cost.measured({1: 1.0, 2: 1.2, 4: 1.4, 8: 4.0}, {1: 0.1, 4: 0.2})
    for _ in range(15):
        controller.budget(np.array([[0.5]]), 1, 1)
    assert not controller.stops(4, False)  # too little is known
    controller.budget(np.array([[0.5]]), 1, 1)
    assert not controller.stops(1, False) and controller.stops(4, False) and controller.paused


def test_steps_have_to_win_back_the_prompts_that_drafters_read():
    """Time of 25.6 plain steps is a charge of 0.4 on each step to come, and a third of it after 64
    steps, drafted or not."""
    controller = Controller()
    controller.cost.measured({1: 1.0, 2: 1.0}, {1: 0.1})
    for _ in range(32):
        controller.budget(np.array([[0.5]]), 1, 1)
    free = controller.gain(1)
    controller.observe_prompts(1, WHOLE, 25.6 + 0.1)
    assert controller.gain(1) == pytest.approx(free * 1.1 / 1.5)
    for _ in range(64):
        controller.observe(Step(1, 1, False, False, 0, 1.0))
    assert controller.gain(1) == pytest.approx(free * 1.1 / (1.1 + 0.4 * 0.365), rel=0.01)


def ratio(cost: StepCost) -> float:
    """Log cost of two rows over one."""
    return float(np.log(cost.verify(2) / cost.verify(1)))


def taught(times: int, error: float, noise: float = 0.0) -> StepCost:
    """Costs after as many comparisons of two rows with one, with this log error of the first."""
    cost = StepCost()
    cost.measured({1: 1.0, 2: 1.0}, {1: 0.1})
    for turn in range(times + 1):
        rows, sign = 1 + turn % 2, 1 - turn % 4  # 2 rows: 0 and −2 in turn
        cost.observe(rows, True, 1.0 if rows == 1 else np.exp(error + noise * (sign + 1)))
    return cost


def test_what_is_measured_at_start_up_counts_as_little_as_it_is_certain():
    """Two sizes that are a factor of two apart: prior variance 0.25 · 2 (1 − 1/e), noise 0.15²."""
    assert ratio(taught(1, 0.3)) == pytest.approx(0.3 * 0.316 / (0.316 + 0.0225), rel=0.01)
    assert taught(1, 0.3).doubt(2, 1) < 0.5 * StepCost.doubt(taught(0, 0.3), 2, 1)


def test_costs_settle_and_follow():
    found = []
    for error in (0.3, 0.4):
        cost = taught(2000, 0.3, noise=0.15)
        cost.observe(2, True, np.exp(error))
        found.append(ratio(cost))
    assert found[0] == pytest.approx(0.3, abs=0.02)
    assert found[1] - found[0] == pytest.approx(0.1 * 0.0166, rel=0.25)


def test_one_outlier_does_not_decide():
    """The first comparison of all, of an error of e³, and a later one."""
    variance = 0.316 + 0.0225
    trust = (2 * variance**0.5 / 3.0) ** 1.5
    assert ratio(taught(1, 3.0)) == pytest.approx(3.0 * trust * 0.316 / variance, rel=0.01)
    settled = taught(101, 0.0)
    settled.observe(1, True, 1.0)
    settled.observe(2, True, np.exp(3.0))
    assert ratio(settled) < 0.02


def test_costs_are_learned_after_a_second_step_of_seconds():
    """As where the second step compiled: 1, 2 and 4 rows take 1, 1.2 and 1.5."""
    cost, times = StepCost(), {1: 1.0, 2: 1.2, 4: 1.5}
    cost.measured({1: 1.0, 2: 1.02, 4: 1.3}, {1: 0.1})
    for rows, factor in [(1, 1.0), (2, 50.0), *[(1, 1.0), (4, 1.0), (2, 1.0)] * 20]:
        cost.observe(rows, True, factor * times[rows])
    found = cost.verify(np.array([1, 2, 4])) / cost.verify(1)
    assert found == pytest.approx([1.0, 1.2, 1.5], rel=0.05)


def test_an_error_teaches_sizes_that_were_not_seen():
    cost = StepCost()
    cost.measured({1: 1.0, 2: 1.0, 4: 1.0, 64: 2.0}, {1: 0.1})
    for _ in range(8):
        cost.observe(1, True, 1.0)
        cost.observe(4, True, 2.0)
    assert float(cost.verify(4)) == pytest.approx(2 * float(cost.verify(1)), rel=0.02)
    assert 1.2 < float(cost.verify(2) / cost.verify(1)) < 1.8
    assert cost.doubt(4, 1) < 0.6 * cost.doubt(64, 1)


def test_the_noisier_a_machine_the_less_is_known():
    """After as many steps, of which most are alike and teach nothing but the noise."""
    found = []
    for noise in (0.05, 0.1, 0.4):
        cost, draw = StepCost(), np.random.default_rng(0)
        cost.measured({1: 1.0, 2: 1.0}, {1: 0.1})
        for turn in range(300):
            cost.observe(1, turn % 30 == 0, draw.lognormal(0, noise))
        found.append(cost.doubt(1, 1))
    assert found == sorted(found) and found[2] > 2 * found[0]


def test_plain_steps_are_compared_with_trees():
    cost = StepCost()
    cost.measured({1: 1.0, 2: 1.0}, {1: 0.1})
    for turn in range(40):
        cost.observe(1, turn % 2 > 0, 1.1 if turn % 2 else 1.0)
    assert cost.plain(1) == pytest.approx(float(cost.verify(1)) / 1.1, rel=0.01)


@pytest.mark.parametrize("by", [LOOKUP, BRIEF, WHOLE])
def test_drafting_is_compared_with_its_step(by):
    cost = StepCost()
    cost.measured({1: 1.0, 2: 1.0}, {1: 0.1, 4: 0.1})
    before = cost.draft(4, by)
    for _ in range(30):
        cost.observe(1, True, 3.0)  # a machine that is slow for a while
        cost.observe_draft(1, by, 0.6, 0)
    assert cost.draft(1, by) == pytest.approx(0.2 * float(cost.verify(1)), rel=0.05)
    assert cost.draft(4, by) > 1.1 * before, "a size that was not seen follows"
    cost.observe_draft(1, by, 0.6 + 30, 100)
    assert cost.read == pytest.approx(0.1 * float(cost.verify(1)), rel=0.05)


def test_more_requests_than_any_size_that_was_measured():
    cost = Controller().cost
    cost.observe(4000, True, 1.0)
    for _ in range(3):
        cost.observe_draft(4000, WHOLE, cost.draft(4000) / cost.of(1.0), 0)
    assert np.isfinite(cost.draft(4000)) and cost.draft(4000) >= cost.draft(1024)
