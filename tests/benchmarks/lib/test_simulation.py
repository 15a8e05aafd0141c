"""Simulated streams of two artificial domains, see `support.world`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from lib.policies import POLICIES, Fixed, Frozen
from lib.simulation import CostModel, Simulation, SimulationConfig, misses_of, simulate
from lib.simulation_figures import tau_of
from lib.streams import AWAY, HOME, Place, make_stream
from support.world import World

from vllm_specblock.adapt.policy.interface import (
    Action,
    Always,
    Decision,
    Policy,
)
from vllm_specblock.train.eval.steps import Step

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


def test_the_same_seed_gives_the_same_result(world):
    before = copy.deepcopy(world[1].state_dict())
    one, other = (run(world, POLICIES["gain"](0), length=24) for _ in range(2))
    assert one == other
    assert one != run(world, POLICIES["gain"](0), length=24, config=replace(CONFIG, seed=1))
    assert all(torch.equal(before[name], each) for name, each in world[1].state_dict().items())


def test_what_training_costs_is_charged_to_the_next_request(world):
    cost = CostModel(step=0.5, update=(2.0, 7.0), swap=(0.25, 1.0))
    found = run(world, Always(), "stationary", 20, config=replace(CONFIG, cost=cost))
    assert [n for n, each in enumerate(found.served) if each.training] == [8, 16]
    assert {each.training for each in found.served} == {0.0, 8.0}
    assert all(each.seconds == each.training + 0.5 * each.steps for each in found.served)
    heads = run(
        world,
        Fixed(Action.HEADS, 8, gated=False),
        "stationary",
        9,
        config=replace(CONFIG, cost=cost),
    )
    assert heads.served[-1].training == 2.25


class RollsBack(Policy):
    """Full updates after 8 and 16 requests, the first of them good; back after 24."""

    count = 0

    def decide(self, request):
        self.count += 1
        return Decision(
            Action.FULL,
            update=self.count in (8, 16),
            good=self.count == 12,
            roll_back=self.count == 24,
        )


def test_a_rollback_brings_the_weights_and_the_training_copy_back(world):
    made, drafter, texts = world
    simulation = Simulation(drafter, made.teacher, RollsBack(), CONFIG)
    seen = {}
    for number, sequence in enumerate(texts[AWAY][:25], 1):
        simulation.serve("away", sequence)
        seen[number] = copy.deepcopy(simulation.serving.state_dict())
    assert simulation.pool.returns == [1]
    for name, value in simulation.updater.drafter.state_dict().items():
        assert torch.equal(value, seen[12][name]) and torch.equal(seen[24][name], seen[12][name])
    assert not torch.equal(seen[20]["lm_head.weight"], seen[24]["lm_head.weight"])
    assert not simulation.updater.optimizer.state


def test_what_serves_is_what_is_learned_and_judged(world):
    """12 nodes are drafted by one block, 24 by two."""
    made, drafter, _ = world
    for nodes, blocks in ((12, 1), (24, 2)):
        simulation = Simulation(drafter, made.teacher, Frozen(), replace(CONFIG, nodes=nodes))
        adaptation = simulation.adaptation
        assert adaptation.updater.learner.recipe.num_blocks == blocks
        assert adaptation.judge.blocks == simulation.shape.num_blocks == blocks


def test_a_miss_is_a_step_that_ends_at_a_node_with_children():
    """Root 0 with children 1 and 2; node 3 below node 1."""
    steps = [
        Step(0, [5, 6, 7, 8], [-1, 0, 0, 1], [0.0] * 4, [0, 1, 1, 1], path, 9)
        for path in ([0], [0, 1], [0, 2], [0, 1, 3])
    ]
    assert [misses_of([step]) for step in steps] == [1, 1, 0, 0]
    assert misses_of(steps) == 2
