"""The bandit as printed, against traces of Algorithm 1 worked by hand, and `always`."""

from __future__ import annotations

import pytest

from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.interface import Action, Always, FinishedRequest

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
