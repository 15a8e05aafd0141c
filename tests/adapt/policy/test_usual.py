"""Which requests are hard: those not above the τ of the ones before them."""

from __future__ import annotations

import random

from vllm_specblock.adapt.policy.evidence import Usual


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
