"""Simulated streams of two artificial domains, see `support.world`."""

from __future__ import annotations

import pytest
from lib.policies import Fixed, Frozen
from lib.simulation import Simulation, SimulationConfig, simulate, tau_of
from lib.streams import AWAY, HOME, switch
from support.world import World

from vllm_specblock.adapt.policy.interface import Action, Always, Policy

CONFIG = SimulationConfig(lr=2e-3, nodes=12)


@pytest.fixture(scope="module")
def world():
    """The world, a drafter that learned home, and texts of both domains."""
    made = World()
    drafter = made.drafter()
    texts = [[made.sequence(domain) for _ in range(72)] for domain in (HOME, AWAY)]
    return made, drafter, texts


def run(world, policy: Policy):
    made, drafter, texts = world
    simulation = Simulation(drafter, made.teacher, policy, CONFIG)
    return simulate(simulation, switch(72, 0), texts)


def late(found, phase: str = "away") -> float:
    served = [each for each in found.requests if each.phase == phase]
    return tau_of(served[-len(served) // 4 :])


@pytest.fixture(scope="module")
def frozen(world):
    return run(world, Frozen())


@pytest.mark.parametrize("policy", [Always(), Fixed(Action.FULL, 8)], ids=["always", "gated"])
def test_full_adaptation_beats_frozen_where_the_domain_has_changed(world, frozen, policy):
    found = run(world, policy)
    assert late(frozen, "home") > late(frozen) + 1  # the drafter does know one of them alone
    assert late(found) > late(frozen) + 0.5
    assert found.updates["full"] >= 6 and found.swaps > 0
    texts = [[each.steps, each.tokens] for each in frozen.requests]
    assert texts[:8] == [[each.steps, each.tokens] for each in found.requests[:8]]
