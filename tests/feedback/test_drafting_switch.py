"""Drafting stops where plain decoding is quicker, not because of a few steps, and comes back."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specblock.feedback.drafting_switch import (
    _PATIENCE,
    _PATIENCE_MEASURED,
    _PROBE_SHARE,
    _PROBE_STEPS,
    _REPAID_IN,
    DraftingSwitch,
)


def taught(survival, steps=400):
    drafting_switch = DraftingSwitch(len(survival))
    for _ in range(steps):
        drafting_switch.learn(np.array([survival]))
    return drafting_switch


def flat_until(tokens, total=2000):
    """A device that computes so many tokens in one unit of time, then time grows with them."""
    return np.maximum(1.0, np.arange(total) / tokens)


GOOD = [0.8, 0.6, 0.5, 0.4, 0.3, 0.2]


def decide(drafting_switch, requests, draft=0.1, cost=None):
    cost = flat_until(64) if cost is None else cost
    for _ in range(_PATIENCE):
        decision = drafting_switch.decide(requests, draft, cost)
    return decision


def test_drafts_while_tokens_are_free_and_rests_when_they_are_not():
    assert not decide(taught(GOOD), 4)
    assert decide(taught(GOOD), 64)


@pytest.mark.parametrize("requests", [1, 8, 20, 30, 40, 64, 200])
def test_takes_the_quicker_of_the_two(requests):
    cost, draft = flat_until(64), 0.15
    speculating = max(
        requests * (1 + sum(GOOD[:n])) / (draft + cost[requests * (1 + n)])
        for n in range(len(GOOD) + 1)
    )
    plain = requests / cost[requests]
    assert decide(taught(GOOD), requests, draft, cost) == (speculating < plain)


def test_a_drafter_that_is_never_right_rests():
    assert decide(taught([0.01] * 6), 1)
    assert not decide(taught([0.01] * 6), 1, draft=0.0)


def test_a_few_slow_steps_change_nothing():
    drafting_switch, cost = taught(GOOD), flat_until(64)
    for _ in range(3):
        for _ in range(_PATIENCE - 1):
            assert not drafting_switch.decide(64, 0.1, cost)
        assert not drafting_switch.decide(4, 0.1, cost)


def test_comes_back_at_once_but_only_where_it_clearly_pays():
    drafting_switch, cost = taught(GOOD), flat_until(64)
    assert decide(drafting_switch, 64)
    assert not drafting_switch.decide(4, 0.1, cost)
    drafting_switch = taught([0.5])
    assert decide(drafting_switch, 64)
    assert drafting_switch.decide(1, 0.49, cost)  # 1.5 tokens for 1.49: not worth a change
    assert not drafting_switch.decide(1, 0.4, cost)


def test_batches_beyond_the_table_decide_nothing():
    drafting_switch = taught(GOOD)
    assert not decide(drafting_switch, 5000) and not drafting_switch.all_paused


def test_trees_that_were_seen_last_count_most():
    drafting_switch = taught([0.9, 0.9])
    for _ in range(200):
        drafting_switch.learn(np.array([[0.2, 0.1], [0.4, 0.1]]))
    assert drafting_switch.usual == pytest.approx([0.3, 0.1], abs=0.02)
    drafting_switch.learn(np.zeros((0, 2)))
    assert drafting_switch.usual == pytest.approx([0.3, 0.1], abs=0.02)


def test_a_handful_of_steps_is_enough_to_rest_for_the_first_time():
    """Nothing is known at first: the prior must not outweigh what is seen."""
    drafting_switch, steps = DraftingSwitch(12), 0
    while not drafting_switch.all_paused:
        drafting_switch.learn(np.full((8, 12), 0.05))
        drafting_switch.decide(8, 0.3, flat_until(16))
        steps += 1
    assert _PATIENCE <= steps <= 3 * _PATIENCE


def probed(survival, steps=3000):
    """Decisions of an engine at rest whose trees would be worth `survival`."""
    drafting_switch = DraftingSwitch(2, probes=True)
    drafting_switch.learn(np.zeros((1, 2)))
    for _ in range(400):
        drafting_switch.learn(np.array([[0.01, 0.01]]))
    cost, found = flat_until(64), []
    for _ in range(steps):
        found.append(drafting_switch.decide(1, 0.1, cost))
        if not drafting_switch.all_paused:
            drafting_switch.learn(np.array([survival]))
    return np.array(found[_PATIENCE:])


def test_a_long_rest_is_broken_by_ever_rarer_probes():
    all_paused = probed([0.01, 0.01])
    assert all_paused.mean() > 0.98
    begins = np.flatnonzero(all_paused[:-1] & ~all_paused[1:])
    gaps = np.diff(begins)
    assert len(begins) >= 4 and (np.diff(gaps)[:2] > 0).all() and (np.diff(gaps) >= 0).all()


def test_a_probe_finds_out_that_drafting_pays_again():
    all_paused = probed([0.9, 0.8])
    assert not all_paused[-2000:].any()


def test_without_probes_a_rest_goes_on():
    drafting_switch = taught([0.01] * 6)
    assert decide(drafting_switch, 1)
    assert all(drafting_switch.decide(1, 0.1, flat_until(64)) for _ in range(2000))


def test_what_was_measured_goes_before_costs_and_is_believed_sooner():
    drafting_switch = taught(GOOD)
    assert not any(
        drafting_switch.decide(64, 0.1, flat_until(64), gain=1.2) for _ in range(2 * _PATIENCE)
    )
    found = [
        drafting_switch.decide(1, 0.1, flat_until(64), gain=0.9) for _ in range(_PATIENCE_MEASURED)
    ]
    assert found == [False] * (_PATIENCE_MEASURED - 1) + [True]
    assert drafting_switch.decide(1, 0.1, flat_until(64), gain=1.02)  # not worth a change
    assert not drafting_switch.decide(64, 0.1, flat_until(64), gain=1.1)


def test_prompts_wait_where_drafting_is_known_not_to_pay():
    def rests(gain):
        return DraftingSwitch(3).decide(64, 0.1, flat_until(64), gain, can_wait=True)

    assert rests(0.9) and not rests(1.1)
    assert not rests(None), "what costs say has to be seen several times"


def test_a_rest_ends_where_catching_up_is_won_back():
    def awake(gain, catch_up):
        switch = DraftingSwitch(3, probes=True)
        for _ in range(_PATIENCE_MEASURED):
            switch.decide(4, 0.1, flat_until(64), 0.9)
        assert switch.all_paused
        return not switch.decide(4, 0.1, flat_until(64), gain, catch_up)

    assert awake(1.1, 0.0) and awake(1.1, 0.09 * _REPAID_IN)
    assert not awake(1.1, 0.11 * _REPAID_IN) and awake(1.3, 0.11 * _REPAID_IN)


def test_probes_are_rarer_where_catching_up_takes_long():
    def first_probe(catch_up, gain=0.9):
        switch = DraftingSwitch(3, probes=True)
        for step in range(5_000):
            if not switch.decide(4, 0.1, flat_until(64), gain, catch_up) and step > 10:
                return step
        return None

    later = first_probe(10.0) - first_probe(0.0)
    assert later == pytest.approx(10 / _PROBE_SHARE, abs=10)
    steps = _PROBE_STEPS * 4  # of four requests, each with three nodes
    assert first_probe(0.0, 0.8) == pytest.approx(steps * (1 / 0.8 - 1) / _PROBE_SHARE, abs=10)
    slow = first_probe(0.0, 0.01)
    assert first_probe(0.0, 0.8) < slow < 5_000, "one slow measurement is not for good"
