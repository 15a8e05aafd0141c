"""Streams that half of the requests attack: what the others keep."""

from __future__ import annotations

from lib.attacks import attacked, kept, scaled
from lib.policies import POLICIES
from lib.simulation import Simulation, SimulationConfig, simulate
from lib.streams import HOME
from support.world import World

LENGTH = 160
CONFIG = SimulationConfig(lr=2e-3, nodes=12)


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
        simulation = Simulation(drafter, world.teacher, POLICIES[name](0), CONFIG)
        found[name] = simulate(simulation, attacked(LENGTH), texts)
    result = kept(found["gain"].requests, found["frozen"].requests)
    assert found["gain"].updates
    assert result.share >= 0.98 and result.longest <= 3, result
