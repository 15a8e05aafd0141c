"""Rates and delays of the evidence; texts differ by 0.09 of a usual one's steps. And which requests
are hard."""

from __future__ import annotations

import random
from statistics import median

import pytest

from vllm_specblock.adapt.policy.evidence import GOOD, BettingEvidence, FallDetector, Usual

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
