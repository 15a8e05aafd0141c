"""Policies by hand-worked traces, and rates and delays of the evidence that they rest on."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.evidence import GOOD, BettingEvidence, FallDetector, Usual
from vllm_specblock.adapt.policy.gain_bandit import EXPLORING, TRIES, GainBandit
from vllm_specblock.adapt.policy.interface import Action, Always, FinishedRequest

SKIP, HEADS, FULL = Action.SKIP, Action.HEADS, Action.FULL
COST = {HEADS: 0.1, FULL: 0.2}
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


def test_three_falling_windows_roll_back_and_forget_the_values():
    bandit = PaperBandit(Schedule(**GREEDY))
    windows = [feed(bandit, 8, tokens=tokens) for tokens in (40, 50, 45, 40)]
    assert [window[-1].roll_back for window in windows] == [False, False, False, True]
    assert [window[-1].good for window in windows] == [True, True, False, False]
    assert not any(each.roll_back for window in windows for each in window[:-1])
    assert bandit.values == {HEADS: 0.0, FULL: 0.0}
    # The window that rolled back is not one of the next three.
    later = [feed(bandit, 8, tokens=tokens)[-1].roll_back for tokens in (39, 38, 37)]
    assert later == [False, False, True]


def test_always_updates_everything_every_eight_requests_without_a_gate():
    assert [n for n, each in enumerate(feed(Always(), 25), 1) if each.update] == [8, 16, 24]
    assert updates(feed(Always(), 8)) == [FULL] and not Always().gated
    assert updates(feed(Always(HEADS, 3), 10)) == [HEADS] * 3


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
    # One before the cost is known, and a try more per arm while beliefs settle.
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


SPREAD = 0.09


def first(detector, draw, mean: float, count: int, spread: float = SPREAD) -> int | None:
    """Number of the request that decides, None within `count`."""
    return next((i for i in range(1, count + 1) if detector.add(draw.gauss(mean, spread))), None)


def test_a_version_that_is_better_is_seldom_left():
    draw = random.Random(0)
    left = sum(first(BettingEvidence(), draw, 0.015, 1000) is not None for _ in range(300))
    assert left <= 3


def test_equal_versions_are_left_as_seldom_as_the_threshold_says():
    """Once in `threshold` requests on average at most; with 20 in place of 1,000 it can be seen."""
    draw = random.Random(1)
    evidence, found, count = BettingEvidence(GOOD), 0, 60_000
    for _ in range(count):
        if evidence.add(draw.gauss(0, SPREAD)):
            found += 1
            evidence.reset()
    assert 20 < found < count / GOOD


@pytest.mark.parametrize(
    "loss, spread, delay",
    [
        *((0.03, 0.09, 110), (0.06, 0.09, 36), (0.15, 0.09, 13), (0.3, 0.09, 12)),
        *((0.03, 0.045, 36), (0.06, 0.045, 17), (0.15, 0.045, 12)),
    ],
)
def test_a_loss_after_good_requests_is_found(loss, spread, delay):
    draw, delays = random.Random(2), []
    for _ in range(150):
        evidence = BettingEvidence()
        if first(evidence, draw, 0.015, 300, spread) is None:
            delays.append(first(evidence, draw, -loss, 2000, spread))
    assert median(delays) == pytest.approx(delay, rel=0.2)


def test_a_fall_of_tau_trips_and_noise_does_not():
    draw, delays, false = random.Random(3), [], 0
    for _ in range(100):
        detector = FallDetector()
        if first(detector, draw, 3.0, 300, 0.3) is not None:
            false += 1
            continue
        delays.append(first(detector, draw, 2.0, 300, 0.3))
    assert false <= 5
    assert None not in delays
    assert median(delays) <= 6


def test_a_rise_of_tau_does_not_trip():
    draw, detector = random.Random(4), FallDetector()
    assert first(detector, draw, 2.0, 200, 0.3) is first(detector, draw, 3.0, 200, 0.3) is None
    detector.reset()
    assert detector.excess == 0 and not detector.add(-100.0)


def test_it_parts_what_a_drafter_knows_from_what_it_does_not():
    draw, usual = random.Random(0), Usual()
    kinds = [draw.random() < 0.5 for _ in range(200)]
    hard = [usual.is_hard(draw.gauss(3.4 if known else 1.6, 0.4)) for known in kinds]
    wrong = sum(known == is_hard for known, is_hard in zip(kinds[8:], hard[8:]))
    assert wrong < 8


def test_of_requests_of_one_kind_half_are_hard():
    draw, usual = random.Random(2), Usual()
    hard = [usual.is_hard(draw.gauss(3.0, 0.5)) for _ in range(1000)]
    assert 450 < sum(hard) < 550
    usual = Usual()
    assert all(usual.is_hard(1.0) for _ in range(100)), "where nothing is ever accepted, too"
