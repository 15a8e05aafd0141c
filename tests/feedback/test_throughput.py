"""Steps with and without drafts are timed against each other, by how many requests decode."""

from __future__ import annotations

import pytest

from vllm_specblock.feedback.throughput import CLEAR, EVERY, SELDOM, Throughput


def steps(meter: Throughput, requests: int, count: int, tokens: float, seconds: float) -> None:
    for _ in range(count):
        meter.observe(requests, True, tokens, seconds)


def test_nothing_is_said_of_what_was_not_timed():
    meter = Throughput()
    assert meter.wants_plain(4) and meter.gain(4) is None
    meter.observe(4, False, 4, 1.0)
    assert not meter.wants_plain(4) and meter.gain(4) is None
    steps(meter, 4, 7, 9, 1.5)
    assert meter.gain(4) is None, "a few steps say nothing"
    steps(meter, 4, 1, 9, 1.5)
    assert meter.gain(4) == pytest.approx(9 / 4 / 1.5)
    assert meter.gain(3) == meter.gain(4), "of one class"
    assert meter.gain(5) is None and meter.wants_plain(5)
    assert meter.gain(4, sampling=True) is None and meter.wants_plain(4, sampling=True)


def lost(meter: Throughput, requests: int, gain: float, sampling: bool = False) -> None:
    meter.observe(requests, False, requests, 1.0, sampling)
    for _ in range(8):
        meter.observe(requests, True, gain * requests, 1.0, sampling)


def test_where_the_neighbours_lose_nobody_tries():
    meter = Throughput()
    lost(meter, 8, 0.7)
    for requests, known in (2, None), (4, 0.7), (8, 0.7), (16, 0.7), (32, None):
        assert meter.gain(requests) == (known and pytest.approx(known)), requests
    assert meter.gain(8, sampling=True) == pytest.approx(0.7), "of greedy ones more is accepted"
    assert meter.gain(4, sampling=True) is None
    lost(meter, 2, 0.9)
    assert meter.gain(4) == pytest.approx(0.9), "of two the one that loses less"
    lost(meter, 4, 1.5)
    assert meter.gain(4) == pytest.approx(1.5), "what was timed counts alone"


def test_neighbours_for_which_drafts_pay_say_nothing():
    meter = Throughput()
    lost(meter, 8, 1.3)
    lost(meter, 2, 0.7)
    lost(meter, 1, 0.7, sampling=True)
    assert meter.gain(4) is None and meter.gain(16) is None
    assert meter.gain(1) == pytest.approx(0.7), "two requests that lose"
    assert meter.gain(2, sampling=True) == pytest.approx(0.7)


def test_plain_steps_are_timed_again_where_there_is_little_to_win():
    def until_plain(gain):
        meter = Throughput()
        meter.observe(2, False, 2, 1.0)
        for step in range(10 * EVERY):
            if meter.wants_plain(2):
                return step
            meter.observe(2, True, 2 * gain, 1.0)
        return None

    assert until_plain(CLEAR + 0.05) == SELDOM * EVERY, "seldom, but not never"
    assert until_plain(1.05) == until_plain(0.5) == EVERY


def test_whether_to_time_again_is_asked_of_the_batches_own_kind():
    meter = Throughput()
    for sampling, tokens in (False, 4), (True, 2):
        meter.observe(2, False, 2, 1.0, sampling)
        for _ in range(EVERY):
            meter.observe(2, True, tokens, 1.0, sampling)
    assert meter.gain(2) > CLEAR > meter.gain(2, sampling=True)
    assert not meter.wants_plain(2) and meter.wants_plain(2, sampling=True)


def test_pauses_of_the_machine_are_no_time_of_a_step():
    meter = Throughput()
    for _ in range(3):
        meter.observe(8, False, 8, 1.0)
    steps(meter, 8, 8, 20, 2.0)
    steps(meter, 8, 5, 20, 40.0)
    meter.observe(8, False, 8, 30.0)
    assert meter.gain(8) == pytest.approx(20 / 8 / 2)


def test_a_machine_that_has_become_slower_is_believed():
    meter = Throughput()
    meter.observe(1, False, 1, 1.0)
    steps(meter, 1, 30, 2, 1.0)
    steps(meter, 1, 20, 2, 4.0)
    assert meter.gain(1) == pytest.approx(0.5) and meter.wants_plain(1)
    for _ in range(5):
        meter.observe(1, False, 1, 4.0)
    assert meter.gain(1) == pytest.approx(2.0)


def test_few_requests_are_averaged_over_more_steps():
    """One step in which everything was accepted says more of a batch than of one request."""
    found = []
    for requests in (1, 8):
        meter = Throughput()
        meter.observe(requests, False, requests, 1.0)
        steps(meter, requests, 200, requests, 1.0)
        meter.observe(requests, True, 9 * requests, 1.0)
        found.append(meter.gain(requests))
    assert 1 < found[0] < 1.25 < found[1]


def test_batches_of_one_class_are_compared_by_request():
    """Six plain requests take as long as eight: they are no slower."""
    meter = Throughput()
    for _ in range(8):
        meter.observe(6, False, 6, 1.0)
    steps(meter, 8, 10, 8 * 1.2, 1.0)
    assert meter.gain(8) == meter.gain(6) == pytest.approx(1.2)


def test_a_machine_that_becomes_slower_at_rest_is_no_gain():
    meter = Throughput()
    steps(meter, 4, 10, 4, 1.1)
    for seconds in [1.0] * 7 + [3.0] * 20:
        meter.observe(4, False, 4, seconds)
    assert meter.gain(4) == pytest.approx(1 / 1.1)
    meter.forget_drafting(4)
    steps(meter, 4, 4, 4, 2.0)
    assert meter.gain(4) == pytest.approx(1.5), "a probe is held against the steps before it"


def test_a_probe_begins_anew():
    meter = Throughput()
    meter.observe(8, False, 8, 1.0)
    steps(meter, 8, 50, 8, 2.0)
    meter.forget_drafting(8)
    assert meter.gain(8) is None
    steps(meter, 8, 4, 24, 1.5)
    assert meter.gain(8) == pytest.approx(2.0, rel=0.25)
    meter.forget_drafting(1)  # of which nothing is known


def test_what_drafters_take_for_prompts_is_spread_over_the_steps():
    meter = Throughput()
    meter.observe(8, False, 8, 1.0)
    steps(meter, 8, 10, 12, 1.0)
    assert meter.gain(8) == pytest.approx(1.5)
    meter.observe_prompts(64.0)  # half a second for each of 128 steps
    assert meter.gain(8) == pytest.approx(1.5 / 1.5, rel=0.1)
    steps(meter, 8, 1000, 12, 1.0)
    assert meter.gain(8) == pytest.approx(1.5, rel=0.01), "these prompts are long done"
