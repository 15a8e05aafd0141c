"""Drafting stops where plain decoding is quicker, not because of a few steps, and comes back."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specblock.verify.rest import _PATIENCE, Rest


def taught(survival, steps=400):
    rest = Rest(len(survival))
    for _ in range(steps):
        rest.learn(np.array([survival]))
    return rest


def flat_until(tokens, total=2000):
    """A device that computes so many tokens in one unit of time, then time grows with them."""
    return np.maximum(1.0, np.arange(total) / tokens)


GOOD = [0.8, 0.6, 0.5, 0.4, 0.3, 0.2]


def decide(rest, requests, draft=0.1, cost=None):
    cost = flat_until(64) if cost is None else cost
    for _ in range(_PATIENCE):
        decision = rest.decide(requests, draft, cost)
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
    rest, cost = taught(GOOD), flat_until(64)
    for _ in range(3):
        for _ in range(_PATIENCE - 1):
            assert not rest.decide(64, 0.1, cost)
        assert not rest.decide(4, 0.1, cost)


def test_comes_back_at_once_but_only_where_it_clearly_pays():
    rest, cost = taught(GOOD), flat_until(64)
    assert decide(rest, 64)
    assert not rest.decide(4, 0.1, cost)
    rest = taught([0.5])
    assert decide(rest, 64)
    assert rest.decide(1, 0.49, cost)  # 1.5 tokens for 1.49: not worth a change
    assert not rest.decide(1, 0.4, cost)


def test_batches_beyond_the_table_decide_nothing():
    rest = taught(GOOD)
    assert not decide(rest, 5000) and not rest.resting


def test_trees_that_were_seen_last_count_most():
    rest = taught([0.9, 0.9])
    for _ in range(200):
        rest.learn(np.array([[0.2, 0.1], [0.4, 0.1]]))
    assert rest.usual == pytest.approx([0.3, 0.1], abs=0.02)
    rest.learn(np.zeros((0, 2)))
    assert rest.usual == pytest.approx([0.3, 0.1], abs=0.02)


def test_a_handful_of_steps_is_enough_to_rest_for_the_first_time():
    """Nothing is known at first: the prior must not outweigh what is seen."""
    rest, steps = Rest(12), 0
    while not rest.resting:
        rest.learn(np.full((8, 12), 0.05))
        rest.decide(8, 0.3, flat_until(16))
        steps += 1
    assert _PATIENCE <= steps <= 3 * _PATIENCE


def probed(survival, steps=3000):
    """Decisions of an engine at rest whose trees would be worth `survival`."""
    rest = Rest(2, probes=True)
    rest.learn(np.zeros((1, 2)))
    for _ in range(400):
        rest.learn(np.array([[0.01, 0.01]]))
    cost, found = flat_until(64), []
    for _ in range(steps):
        found.append(rest.decide(1, 0.1, cost))
        if not rest.resting:
            rest.learn(np.array([survival]))
    return np.array(found[_PATIENCE:])


def test_a_long_rest_is_broken_by_ever_rarer_probes():
    resting = probed([0.01, 0.01])
    assert resting.mean() > 0.98
    begins = np.flatnonzero(resting[:-1] & ~resting[1:])
    gaps = np.diff(begins)
    assert len(begins) >= 4 and (np.diff(gaps)[:3] > 0).all()


def test_a_probe_finds_out_that_drafting_pays_again():
    resting = probed([0.9, 0.8])
    assert not resting[-2000:].any()


def test_without_probes_a_rest_goes_on():
    rest = taught([0.01] * 6)
    assert decide(rest, 1)
    assert all(rest.decide(1, 0.1, flat_until(64)) for _ in range(2000))
