"""Drafts handed out in one launch, and vLLM's own way of doing it."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from support.engines import note_calls
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_specblock.cpu.host_budget import HostBudgetManager, padded, sizes
from vllm_specblock.engine import adaptive
from vllm_specblock.engine.adaptive import TreeBudgetManager
from vllm_specblock.engine.device import Device
from vllm_specblock.feedback.controller import Controller

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="on a GPU vLLM's survivals are rounded otherwise"
)
NUM_NODES, MOST = 24, 8


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """vLLM's own way of it is not compiled."""
    monkeypatch.setattr(
        adaptive_verification,
        "_assign_draft_token_budget_compiled",
        adaptive_verification._assign_draft_token_budget,
    )


def managers_of(engine, kind: type) -> list:
    """(vLLM's, ours) with the same requests and confidences, each with rows of its own."""
    states = engine.runner.req_states
    made = [
        each(states, torch.full((MOST + 1,), -7, dtype=torch.int32), 1, max_total_logits=10**6)
        for each in (adaptive.AdaptiveVerificationManager, kind)
    ]
    made[1]._confidence_probs = made[0]._confidence_probs
    return made


def a_batch(draw: np.random.Generator, steady: bool):
    """(requests, drafts, others, slots): some decode, others are still at the prompt."""
    count = 6 if steady else int(draw.integers(1, MOST + 1))
    drafts = np.full(count, NUM_NODES) if steady else draw.integers(0, NUM_NODES + 1, count)
    others = np.where(drafts > 0, 1, draw.integers(1, 30, count))
    names = [f"request {at}" for at in draw.permutation(count)]
    drafts, others = (dict(zip(names, x.tolist(), strict=True)) for x in (drafts, others))
    return names, drafts, others, torch.from_numpy(draw.permutation(MOST)[:count])


@pytest.mark.parametrize("kind", [TreeBudgetManager, HostBudgetManager])
def test_every_batch_as_vllm_does(budgeted, kind, monkeypatch):
    managers = managers_of(budgeted, kind)
    sent = note_calls(monkeypatch, adaptive, "async_tensor_h2d", lambda *_, **__: "counts")
    draw, changes, before = np.random.default_rng(0), 0, None
    for step in range(36):
        names, drafts, others, slots = a_batch(draw, steady=step % 4 < 2)
        # Hardly any two survivals are equal.
        confidence = draw.random((MOST, NUM_NODES), dtype=np.float32) ** 0.1
        total = sum(drafts.values())
        spent = [0, total, *draw.integers(0, total + 1, 4).tolist()][step % 6]
        found, sizes = [], set()
        for manager in managers:
            manager._confidence_probs.copy_(torch.from_numpy(confidence))
            manager._batch_budget = drafts, others, spent
            given = manager.reallocate_drafts(names, slots)
            *starts, number = given[:3]
            sizes.add(len(given))
            found.append([x.clone() for x in starts])
            assert number == spent and manager._batch_budget is None
            assert starts[1] is manager.query_start_loc, "what graphs have captured"
            assert starts[0].data_ptr() == manager._cu_num_logits.data_ptr()
        assert len(sizes) == 1, "the runner unpacks as many values as vLLM's own give"
        for theirs, mine in zip(*found, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), step
        counts = [(drafts[name], others[name]) for name in names]
        changes, before = changes + (counts != before), counts
    assert len(sent) == changes < 36, "a steady batch's counts were sent again, or others were not"


def test_sizes_that_a_cpu_measures_are_those_in_which_steps_come():
    """One tree, plain steps, and what budgets are padded to, up to a whole tree per request."""
    found = sizes(12, max_requests=8, max_tokens=4096)
    rows = (1, 2, 4, 8, 13, 16, 32, 48, 64, 80, 96)
    assert found == [(n, 1 if n == 13 else min(n, 8)) for n in rows]
    assert set(padded(np.arange(17, 97)).tolist()) <= {size for size, _ in found}
    assert max(sizes(60, 256, 4096)) == (512, 256)
    assert sizes(60, 1, 61) == [(n, 1) for n in (1, 2, 4, 8, 16, 32, 48, 61)]


def test_first_costs_are_what_vllm_profiles(budgeted, monkeypatch):
    """Of the steps that the manager wants to see, on a device with such costs, in ms."""
    monkeypatch.setattr(budgeted.speculator, "controller", Controller())  # the engine keeps its own
    _, ours = managers_of(budgeted, TreeBudgetManager)
    tokens = 2 * NUM_NODES + 2
    asked = [step["num_tokens"] for step in ours.batches_to_profile([NUM_NODES + 1, tokens, 64])]
    ours.set_initial_cost_curves(
        [StepTimingSample(3 + 0.05 * n, 1.0, n, min(n, MOST), True) for n in asked]
    )
    cost = ours.controller.cost
    least = 3 + 0.05 * (NUM_NODES + 1)  # one token runs in the smallest graph
    assert float(cost.verify(tokens)) == pytest.approx((3 + 0.05 * tokens) / least)
    assert cost.draft(MOST) == pytest.approx(1 / least)
    assert ours._padded(np.array([1, tokens, 65])).tolist() == [NUM_NODES + 1, tokens, 65]


class LateClock(Device):
    """Its marks pass when `lag` more were made, as a GPU's do when it lags behind the host."""

    def __init__(self, lag: int) -> None:
        self.lag, self.made = lag, 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def passed(self, mark: int) -> bool:
        return mark + self.lag <= self.made

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


@pytest.mark.parametrize("lag", [0, 7, 10**6])
def test_a_step_is_learned_from_once_the_device_has_run_it(budgeted, monkeypatch, lag):
    manager, clock, seen = budgeted.runner.adaptive_verification, LateClock(lag), []
    monkeypatch.setattr(manager, "clock", clock)
    monkeypatch.setattr(manager.controller, "observe", lambda *x: seen.append((*x, clock.made)))
    monkeypatch.setattr(manager.controller, "drafts", lambda *_: True)
    monkeypatch.setattr(manager, "_timed", deque())
    manager.all_paused = False
    budgeted.generate([list(range(3, 20))], SamplingParams(temperature=0.0, max_tokens=60))
    if lag == 10**6:
        assert not seen
        return
    assert len(seen) > 5
    # From a step's begin to the next one's: two marks around its proposal, and its end.
    assert {(step.seconds, step.draft_seconds) for step, *_ in seen} == {(3.0, 1.0)}
    assert sum(1 + step.accepted for step, *_ in seen) <= 60
    waited = len(manager._timed)
    assert (waited > 0) == (lag > 0)
