"""Simulated streams of two artificial domains, see `support.world`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lib.policies import Fixed, Frozen
from lib.simulation import Simulation, SimulationConfig, simulate
from lib.simulation_figures import tau_of
from lib.streams import AWAY, HOME, Place, make_stream
from support.world import World

from vllm_specblock.adapt.policy.interface import (
    Action,
    Always,
    Decision,
    Policy,
)

CONFIG = SimulationConfig(lr=2e-3, nodes=12)


@pytest.fixture(scope="module")
def world():
    """The world, a drafter that learned home, and texts of both domains."""
    made = World()
    drafter = made.drafter()
    texts = [[made.sequence(domain) for _ in range(72)] for domain in (HOME, AWAY)]
    return made, drafter, texts


def run(world, policy: Policy, stream: str = "switch", length: int = 72, config=CONFIG):
    made, drafter, texts = world
    simulation = Simulation(drafter, made.teacher, policy, config)
    return simulate(simulation, make_stream(stream, length, 0), texts)


def late(found, phase: str = "away") -> float:
    served = [each for each in found.served if each.phase == phase]
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
    texts = [[each.steps, each.tokens] for each in frozen.served]
    assert texts[:8] == [[each.steps, each.tokens] for each in found.served[:8]]


class UpTo(Fixed):
    """Full updates every 8 requests, but none after so many."""

    def __init__(self, last: int, gated: bool):
        super().__init__(Action.FULL, 8, gated)
        self.left = last

    def decide(self, request):
        self.left -= 1
        return super().decide(request) if self.left >= 0 else Decision(Action.SKIP)


def test_the_pool_brings_the_start_back_with_its_domain(world):
    made, drafter, texts = world
    stream = [Place("away", AWAY, n) for n in range(24)]
    stream += [Place("home", HOME, n) for n in range(40)]
    config = replace(CONFIG, rehearsal=False, lr=5e-3)
    found = {
        gated: simulate(Simulation(drafter, made.teacher, UpTo(24, gated), config), stream, texts)
        for gated in (True, False)
    }
    # By way of another kept version, or at once.
    assert found[True].returns[-1] == 0 and found[False].returns == []
    assert [each.version for each in found[True].served[-8:]] == [0] * 8
    assert late(found[True], "home") > late(found[False], "home") + 0.5
