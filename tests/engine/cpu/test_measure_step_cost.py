"""Steps are measured in turns, in bounded time, and an engine knows its costs before a request."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines import make_engine
from vllm.platforms import current_platform

from vllm_specblock.engine.cpu import measure_step_cost
from vllm_specblock.engine.cpu.measure_step_cost import Size, measure, round_up, sizes

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM measures on a GPU")


def test_sizes_are_those_in_which_steps_come():
    """One tree, plain steps, and what budgets are rounded to, up to a whole tree for everybody."""
    found = sizes(12, max_requests=8, max_tokens=4096)
    assert found[:2] == [Size(1, 1), Size(13, 1)]
    assert found[2:] == [Size(n, min(n, 8)) for n in (2, 4, 8, 16, 32, 48, 64, 80, 96)]
    assert {round_up(n) for n in range(17, 97)} <= {size.tokens for size in found}
    assert max(sizes(60, 256, 4096)) == Size(512, 256)
    assert sizes(60, 1, 61) == [Size(1, 1), Size(61, 1), *(Size(n, 1) for n in (2, 4, 8, 16, 32))]


class Machine:
    """Takes 1 s a token when it feels like it, and as often ten times that."""

    def __init__(self, second: float):
        self.now, self.taken, self.second = 0.0, [], second

    def step(self, size: Size) -> tuple[float, float]:
        slow = 10 if len(self.taken) % 3 == 1 else 1
        self.taken.append(size)
        verifying, drafting = slow * self.second * size.tokens, slow * self.second
        self.now += verifying + drafting
        return verifying, drafting

    def clock(self) -> float:
        return self.now


def test_the_least_of_turns_counts():
    machine, wanted = Machine(1e-3), sizes(12, 4, 4096)
    verify, draft = measure(machine.step, wanted, machine.clock)
    assert verify == pytest.approx({size: 1e-3 * size.tokens for size in wanted})
    assert draft == pytest.approx(dict.fromkeys((1, 2, 4), 1e-3))
    # In turns: no size has all its steps side by side.
    assert machine.taken[2 * len(wanted) :][: len(wanted)] == wanted


def test_large_models_see_two_sizes():
    machine = Machine(3.0)
    verify, draft = measure(machine.step, sizes(12, 4, 4096), machine.clock)
    assert set(verify) == {Size(1, 1), Size(13, 1)} and set(draft) == {1}
    assert len(machine.taken) == 4


def test_an_engine_knows_its_costs_before_the_first_request(monkeypatch):
    speculative = {"num_speculative_tokens": 24, "enable_adaptive_verification": True}
    kept = []
    monkeypatch.setattr(measure_step_cost.logger, "info", lambda *args: kept.append(args))
    engine = make_engine(speculative, max_num_seqs=4)
    manager = engine.runner.adaptive_verification
    assert not manager.explores and kept
    seconds = manager.verify_costs.seconds(np.array([1, 25, 100]), 1)
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all() and seconds[2] > seconds[0]
    assert manager.draft_costs.seconds(np.array([1, 4]), 1).min() > 0
    speculator = engine.speculator
    assert not speculator.counters.total.any() and not speculator.adaptive.acceptance.judged.any()
