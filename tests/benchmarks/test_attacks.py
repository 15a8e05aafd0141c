"""Streams that half of the requests attack: what the others keep."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lib.attacks import ATTACKS, CLEAN, attacked, kept, scaled
from lib.policies import make_policy
from lib.simulation import Served, Simulation, SimulationConfig, simulate
from lib.streams import HOME
from support.world import World

LENGTH = 160
CONFIG = SimulationConfig(lr=2e-3, nodes=12)


def served(phase: str, tokens: int) -> Served:
    return Served(phase, 10, tokens, 1.0, 0.0, 0)


def test_half_of_the_requests_attack_and_no_text_comes_twice():
    stream = attacked(100)
    assert Counter(place.phase for place in stream) == {
        "clean, before": 20,
        "clean, after": 20,
        **{name: 10 for each in ATTACKS for name in (each, f"clean, {each}")},
    }
    assert len({(place.domain, place.text) for place in stream}) == len(stream) == 100
    assert {place.domain for place in stream if place.phase.startswith(CLEAN)} == {HOME}
    assert [place.domain for place in stream if place.phase in ATTACKS] == [1] * 10 + [2] * 10 + [
        3
    ] * 10


def test_what_is_kept_by_hand():
    """Windows of two: whole, a loss, a loss, whole."""
    phase = "clean, before"
    frozen = [served(phase, 40)] * 8 + [served("loop", 40)]
    found = [served(phase, tokens) for tokens in (40, 40, 38, 40, 39, 39, 40, 44)]
    result = kept([*found, served("loop", 10)], frozen, window=2)
    assert result.share == pytest.approx(320 / 320) and result.by_phase == {phase: result.share}
    assert result.longest == 2


def test_clean_requests_keep_their_speed():
    """As `benchmarks/adaptation.py attacks` asks of a real pair: 98 %, and no loss that lasts."""
    world = World()
    drafter, part = world.drafter(), LENGTH // 5
    home = [world.sequence(HOME) for _ in range(LENGTH)]
    loop = [world.random_text(5).repeat(9)[:44] for _ in range(part)]
    texts = [
        home,
        [world.along(world.random_text()) for _ in range(part)],
        [world.along(text) for text in loop],
        [scaled(world.sequence(HOME)) for _ in range(part)],
    ]
    found = {}
    for name in ("frozen", "gain"):
        simulation = Simulation(drafter, world.teacher, make_policy(name, 0), CONFIG)
        found[name] = simulate(simulation, attacked(LENGTH), texts)
    result = kept(found["gain"].served, found["frozen"].served)
    assert found["gain"].updates
    assert result.share >= 0.98 and result.longest <= 3, result


def test_loops_and_features_that_are_no_numbers_are_refused():
    """At the book, and counted."""
    world = World()
    simulation = Simulation(world.drafter(), world.teacher, make_policy("gain", 0), CONFIG)
    simulation.serve("loop", world.along(torch.zeros(44, dtype=torch.int64)))
    simulation.serve("scaled", scaled(world.sequence(HOME), float("inf")))
    assert simulation.adaptation.book.counts == {"loop": 1, "not finite": 1}
    assert simulation.noted["dropped_records"] == 2
