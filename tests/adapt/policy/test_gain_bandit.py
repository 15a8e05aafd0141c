"""The rule `gain`: what it settles on, what exploring may cost, and that nothing locks it in."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from support.toy_serving import Toy

from vllm_specblock.adapt.policy.bandit import PaperBandit
from vllm_specblock.adapt.policy.gain_bandit import EXPLORING, TRIES, GainBandit
from vllm_specblock.adapt.policy.interface import Action, Always, FinishedRequest

SKIP, HEADS, FULL = Action.SKIP, Action.HEADS, Action.FULL
COST = {HEADS: 0.1, FULL: 0.2}


def request(misses: float = 6.0, steps: int = 10, seconds: float = 1.0):
    return FinishedRequest(misses, steps, 40, seconds)


def feed(policy, count: int, **what):
    return [policy.decide(request(**what)) for _ in range(count)]


def updates(decisions) -> list[Action]:
    return [each.push for each in decisions if each.update]


def serve(bandit, gains, costs, count: int = 3000, seed: int = 0) -> list[Action]:
    """Updates; each gives a noisy gain at a fixed cost. A request takes a second."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        decision = bandit.decide(request(misses=draw.uniform(4, 8)))
        if decision.update:
            arm = decision.push
            found.append(arm)
            bandit.reward(arm, draw.gauss(gains[arm], 0.002), costs[arm], 0.002)
    return found


@pytest.mark.parametrize("better, worse", [(HEADS, FULL), (FULL, HEADS)])
def test_it_finds_the_better_arm(better, worse):
    for seed in range(5):
        found = serve(GainBandit(), {better: 0.02, worse: 0.005}, COST, seed=seed)
        late = found[len(found) * 2 // 3 :]
        # A hundredth of the time pays for a look at the other now and then.
        assert late.count(better) > 0.8 * len(late) > 80


def test_what_does_not_pay_loses_no_more_than_the_share_for_exploring():
    """64 requests of a second each: a gain of 1 % is worth 0.64 s."""
    gains, costs = {HEADS: 0.01, FULL: 0.01}, {HEADS: 1.5, FULL: 3.0}
    lost = sum(costs[arm] - 0.64 for arm in serve(GainBandit(), gains, costs))
    # One before anybody knows the cost, and a try more per arm while beliefs settle.
    assert 0 < lost < EXPLORING * 3000 + (TRIES + 3) * costs[FULL]
    assert len(serve(GainBandit(), gains, {HEADS: 0.2, FULL: 0.4})) > 250


def test_nothing_is_given_up_for_good():
    bandit = GainBandit()
    assert serve(bandit, {HEADS: -0.02, FULL: -0.02}, COST, 1000)
    assert SKIP in {each.push for each in feed(bandit, 8)}
    assert updates(feed(bandit, 8 + math.ceil(COST[FULL] / EXPLORING)))


def test_an_alarm_forgets_gains_and_the_update_that_is_being_judged():
    bandit = GainBandit()
    assert updates(feed(bandit, 8)) == [FULL]
    bandit.reward(FULL, -0.05, 0.2, 0.001)
    assert bandit.belief.mean[FULL] < -0.03 and bandit.belief.mean[HEADS] < 0
    feed(bandit, 24)
    bandit.alarm()
    assert bandit.belief.mean == {HEADS: 0.0, FULL: 0.0}
    assert (bandit.account, bandit.tries) == (0.0, TRIES)
    bandit.reward(FULL, -0.05, 0.2, 0.001)  # of texts before and behind the change
    assert bandit.belief.mean == {HEADS: 0.0, FULL: 0.0}
    assert updates(feed(bandit, 8)) == [FULL]


HOME, AWAY = 0, 1
SWITCH = [HOME] * 48 + [AWAY] * 192 + [HOME] * 48
SEEDS = range(10)


@pytest.mark.parametrize("misled", [0, 1, 2])
def test_no_lock_in_where_the_first_updates_look_bad(misled):
    """Another domain from the start, so that no alarm helps; a rule that believes one observation
    stays with heads or with nothing."""
    toy = Toy([AWAY] * 256, COST, misled)
    for seed in SEEDS:
        mine, found = toy.serve(GainBandit(), seed)
        always, _ = toy.serve(Always(), seed)
        assert mine > 0.93 * always  # heads were tried for a while
        assert found[-12:].count(FULL) > 3


def test_on_a_switch_it_is_no_slower_than_the_paper_nor_than_updating_always():
    toy = Toy(SWITCH, COST)
    mine, paper, always = (
        [toy.serve(make(seed), seed)[0] for seed in SEEDS]
        for make in (lambda _: GainBandit(), lambda n: PaperBandit(seed=n), lambda _: Always())
    )
    assert fmean(mine) > 1.02 * fmean(paper) and fmean(mine) > fmean(always)
    assert all(one > 0.95 * other for one, other in zip(mine, always))


def test_where_updates_are_dear_it_spares_them_and_where_they_are_free_it_does_not():
    dear, free = ({HEADS: cost / 10, FULL: cost} for cost in (1.0, 0.0))
    for seconds, least in ((dear, 1.03), (free, 0.995)):
        toy = Toy(SWITCH, seconds)
        for_each = [
            (
                toy.serve(GainBandit(), n)[0],
                toy.serve(Always(), n)[0],
                toy.serve(PaperBandit(), n)[0],
            )
            for n in SEEDS
        ]
        mine, always, paper = (fmean(each) for each in zip(*for_each))
        assert mine > least * always and mine > paper
