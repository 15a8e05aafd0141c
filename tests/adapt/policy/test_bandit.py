"""The bandit: Algorithm 1 against traces worked by hand, and what the rule `gain` settles on."""

from __future__ import annotations

import random

import pytest

from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.gain_bandit import GainBandit
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest

SKIP, HEADS, FULL = Action.SKIP, Action.HEADS, Action.FULL
GREEDY = {"epsilon": (0.0, 0.0), "explore_every": 10**9}


def request(tokens: int = 40, misses: float = 6.0, steps: int = 10, seconds: float = 1.0):
    return FinishedRequest(misses, steps, tokens, seconds)


def feed(policy, count: int, **what):
    return [policy.decide(request(**what)) for _ in range(count)]


def updates(decisions) -> list[Action]:
    return [each.push for each in decisions if each.update]


def test_the_first_update_comes_after_warm_up_and_a_full_buffer():
    bandit = PaperBandit(Schedule(**GREEDY))
    found = feed(bandit, 18)
    assert [each.push for each in found] == [SKIP] * 10 + [HEADS] * 8
    assert [each.update for each in found] == [False] * 17 + [True]


def test_values_follow_equation_10_by_hand():
    bandit = PaperBandit(Schedule(**GREEDY))
    feed(bandit, 18, tokens=40)  # Φ before: 40
    # The eighth request after the update closes its interval, then fills the next buffer.
    assert updates(feed(bandit, 8, tokens=48)) == [HEADS]  # Φ after: 48, a gain of 0.2 at s = 6
    assert bandit.values[HEADS] == pytest.approx(0.1 * 0.2 / 6)
    feed(bandit, 8, tokens=36)  # 36 / 48 − 1 = −0.25
    assert bandit.values[HEADS] == pytest.approx(0.9 * 0.1 * 0.2 / 6 - 0.1 * 0.25 / 6)
    assert bandit.values[HEADS] < 0 == bandit.values[FULL]
    assert bandit.decide(request()).push is FULL  # the larger of the two, in cold start


def test_throughput_counts_the_seconds_that_training_took():
    bandit = PaperBandit(Schedule(**GREEDY))
    feed(bandit, 18)
    feed(bandit, 8, tokens=44, seconds=1.25)  # more tokens, and yet fewer per second
    assert bandit.values[HEADS] == pytest.approx(0.1 * (44 / 1.25 / 40 - 1) / 6)


def test_a_weak_signal_teaches_nothing():
    bandit = PaperBandit(Schedule(**GREEDY))
    feed(bandit, 18, misses=4.9)
    feed(bandit, 8, tokens=80, misses=4.9)
    assert bandit.values == {HEADS: 0.0, FULL: 0.0}


def test_two_requests_are_blocked_after_an_update():
    bandit = PaperBandit(Schedule(warm_up=0, buffer=1, **GREEDY))
    assert [each.update for each in feed(bandit, 7)] == [True, False, False] * 2 + [True]


def test_as_printed_it_skips_for_ever_once_nothing_is_positive():
    bandit = PaperBandit(Schedule(warm_up=0, cold_start=1, **GREEDY))
    assert len(updates(feed(bandit, 200))) == 1


def test_exploration_after_the_cold_start_fills_whole_buffers():
    schedule = Schedule(warm_up=0, cold_start=1, epsilon=(0.3, 1.0), explore_every=64)
    bandit = PaperBandit(schedule)
    found = feed(bandit, 64 * 6)
    assert len(updates(found)) >= 5
    assert sum(each.push is SKIP for each in found) > 64 * 4


def test_three_falling_windows_roll_back_and_forget_the_values():
    bandit = PaperBandit(Schedule(**GREEDY))
    windows = [feed(bandit, 8, tokens=tokens) for tokens in (40, 50, 45, 40)]
    assert bandit.values[HEADS] != 0 or bandit.roll_backs
    assert [window[-1].roll_back for window in windows] == [False, False, False, True]
    assert [window[-1].good for window in windows] == [True, True, False, False]
    assert not any(each.roll_back for window in windows for each in window[:-1])
    assert bandit.values == {HEADS: 0.0, FULL: 0.0}
    # The window that rolled back is not one of the next three.
    later = [feed(bandit, 8, tokens=tokens)[-1].roll_back for tokens in (39, 38, 37)]
    assert later == [False, False, True]


def test_epsilon_falls_linearly_over_the_cold_start():
    bandit = PaperBandit(Schedule(warm_up=0, cooldown=0, buffer=1))
    seen = []
    for _ in range(12):
        seen.append(bandit.epsilon)
        bandit.decide(request())
    assert seen[0] == pytest.approx(0.30)
    assert seen[4] == pytest.approx(0.20)
    assert seen[8:10] == pytest.approx([0.10, 0.10])


def test_the_cold_start_tries_both_arms():
    arms = {arm for seed in range(20) for arm in updates(feed(PaperBandit(seed=seed), 80))}
    assert arms == {HEADS, FULL}


def test_the_largest_action_bounds_the_arms():
    bandit = GainBandit(Schedule(largest=HEADS))
    assert {each.push for each in feed(bandit, 400)} == {SKIP, HEADS}


def serve(bandit, gains, costs, count: int = 3000, seed: int = 0):
    """Updates by arm in the last third; each gives a noisy gain at a fixed cost."""
    draw, late = random.Random(seed), []
    for number in range(count):
        decision = bandit.decide(request(misses=draw.uniform(4, 8)))
        if decision.update:
            arm = decision.push
            bandit.reward(arm, draw.gauss(gains[arm], 0.002), costs[arm])
            if number > count * 2 / 3:
                late.append(arm)
    return late


FREE = Schedule(explore_every=10**9)


@pytest.mark.parametrize("better, worse", [(HEADS, FULL), (FULL, HEADS)])
def test_gain_finds_the_better_arm(better, worse):
    schedule = Schedule()
    for seed in range(5):
        late = serve(
            GainBandit(schedule, seed), {better: 0.02, worse: 0.005}, {HEADS: 0.1, FULL: 0.2}, 3000
        )
        assert late.count(better) > 0.9 * len(late) > 80


def test_gain_skips_where_an_update_costs_more_than_it_gains():
    # 64 requests of a second each: a gain of 1 % is worth 0.64 s.
    gains = {HEADS: 0.01, FULL: 0.01}
    assert not serve(GainBandit(FREE), gains, {HEADS: 1.5, FULL: 3.0})
    assert len(serve(GainBandit(FREE), gains, {HEADS: 0.2, FULL: 0.4})) > 80


def test_gain_skips_weak_requests_and_takes_strong_ones():
    bandit = GainBandit(Schedule(warm_up=0, cold_start=1, largest=HEADS, **GREEDY))
    for _ in range(8):
        bandit.decide(request())
    bandit.reward(HEADS, 0.012, 0.32)  # 64 s · 0.02 · x − 0.32 s: worth it above x = 0.25
    assert bandit.decide(request(misses=2.0)).push is SKIP
    assert bandit.decide(request(misses=3.0)).push is HEADS


def test_an_alarm_ends_the_skipping():
    bandit, costs = GainBandit(FREE), {HEADS: 0.1, FULL: 0.1}
    assert not serve(bandit, {HEADS: -0.01, FULL: -0.01}, costs)
    assert not updates(feed(bandit, 100))
    bandit.alarm()
    assert FULL in updates(feed(bandit, 10))
    bandit.reward(FULL, -0.01, 0.1)
    assert not updates(feed(bandit, 100))
    # What it gained before the alarm does not count against what it gains now.
    bandit.alarm()
    assert FULL in updates(feed(bandit, 10))
    bandit.reward(FULL, 0.01, 0.1)
    assert len(updates(feed(bandit, 80))) == 10


def test_one_buffer_makes_an_update_every_eight_requests_whatever_they_are_pushed_to():
    bandit = GainBandit(Schedule(warm_up=0, cooldown=0, **GREEDY))
    feed(bandit, 8)
    bandit.reward(FULL, 0.03, 1.0)
    bandit.values[HEADS], bandit._known[HEADS] = 0.02, 1
    bandit._known[HEADS] = 1
    found = [bandit.decide(request(misses=0.5 + 9 * (n % 2))) for n in range(16)]
    assert {each.push for each in found} == {HEADS, FULL}
    assert [n for n, each in enumerate(found, 1) if each.update] == [8, 16]


def test_the_larger_arm_comes_first_and_heads_where_they_might_do():
    schedule = Schedule(warm_up=0, cooldown=0, **GREEDY)
    for gain, then in ((0.03, FULL), (0.004, HEADS)):
        # 64 requests of a second: 1.92 s and half of it, or 0.26 s and half of it, for 0.2 s.
        bandit = GainBandit(schedule)
        assert updates(feed(bandit, 8)) == [FULL]
        bandit.reward(FULL, gain, 0.2)
        assert updates(feed(bandit, 8)) == [then]


def test_first_rewards_are_averaged():
    bandit = GainBandit(Schedule(warm_up=0, **GREEDY))
    feed(bandit, 8)
    for gain in (-0.03, 0.06, float("nan"), 0.09):
        bandit.reward(FULL, gain, 0.2)
    assert bandit.values[FULL] == pytest.approx(0.04 / 0.6)
    assert bandit.costs[FULL] == pytest.approx(0.2)
