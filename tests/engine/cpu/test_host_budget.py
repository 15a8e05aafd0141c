"""Steps are measured before the first request, in the sizes in which they come."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines import make_engine
from vllm.platforms import current_platform

from vllm_specblock.cpu import host_budget
from vllm_specblock.cpu.host_budget import padded, sizes

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM measures on a GPU")


def test_sizes_are_those_in_which_steps_come():
    """One tree, plain steps, and what budgets are padded to, up to a whole tree per request."""
    found = sizes(12, max_requests=8, max_tokens=4096)
    rows = (1, 2, 4, 8, 13, 16, 32, 48, 64, 80, 96)
    assert found == [(n, 1 if n == 13 else min(n, 8)) for n in rows]
    assert set(padded(np.arange(17, 97)).tolist()) <= {size for size, _ in found}
    assert max(sizes(60, 256, 4096)) == (512, 256)
    assert sizes(60, 1, 61) == [(n, 1) for n in (1, 2, 4, 8, 16, 32, 48, 61)]


def test_an_engine_knows_its_costs_before_the_first_request(monkeypatch):
    speculative = {"num_speculative_tokens": 24, "enable_adaptive_verification": True}
    kept = []
    monkeypatch.setattr(host_budget.logger, "info", lambda *args: kept.append(args))
    engine = make_engine(speculative, max_num_seqs=4)
    cost = engine.runner.adaptive_verification.controller.cost
    assert kept
    found = cost.verify(np.array([1, 25, 100]))
    assert (found > 0).all() and (np.diff(found) >= 0).all() and found[2] > found[0]
    assert min(cost.draft(1), cost.draft(4)) > 1e-3
    speculator = engine.speculator
    assert not speculator.counters.total.any() and not speculator.adaptive.acceptance.judged.any()
