"""Budgets that follow from costs: the tokens stay vLLM's own, and the trees fit what they cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.engines import EAGLE3, make_engine, note_calls
from support.matrix import (
    PROMPTS,
    Checker,
    crowded_engine,
    every_case,
    half_sampled,
    no_pause,
    params,
    to_the_limit,
)
from vllm.platforms import current_platform

from vllm_specblock.engine.runner import speculator
from vllm_specblock.feedback.controller import PLAIN, Controller

on_the_host = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="on a GPU vLLM measures costs, and makes no experiments"
)


@pytest.fixture
def engine(budgeted):
    return budgeted


@pytest.fixture
def verified(engine, monkeypatch):
    """(drafts scheduled, drafts verified) of every decode step from now on."""
    manager = engine.runner.adaptive_verification

    def note(*_) -> tuple[int, int]:
        drafts, _, budget = manager._batch_budget
        return sum(drafts.values()), budget

    return note_calls(monkeypatch, manager, "get_num_tokens", note)


def charge(engine, monkeypatch, of_rows, drafting=0.0):
    """Steps take what `of_rows` says, and drafting so long; no budget is an experiment."""
    manager = engine.runner.adaptive_verification
    controller = Controller()
    controller.cost.measured({n: of_rows(n) for n in range(1, 513)}, {1: drafting})
    monkeypatch.setattr(manager, "controller", controller)
    manager.all_paused = False
    for name in ("observe", "observe_draft"):
        monkeypatch.setattr(controller.cost, name, lambda *_: None)


def vary(engine, monkeypatch):
    """Steps verify all nodes, none, half and a quarter in turn, and draft one block or both."""
    shares, brief = itertools.cycle([1, 0, 1 / 2, 1 / 4]), itertools.cycle([True, False, False])
    controller = engine.runner.adaptive_verification.controller
    monkeypatch.setattr(controller, "budget", lambda _, __, ___, n, *____: int(n * next(shares)))
    monkeypatch.setattr(controller, "brief", lambda *_: next(brief))


@pytest.mark.parametrize("pad", [False, True] if current_platform.is_cpu() else [True])
def test_budgets_that_come_and_go_change_no_token(engine, reference, verified, monkeypatch, pad):
    """On a CPU steps verify all nodes, none, and parts; on a GPU what its costs say.

    In the shapes of a GPU, where nothing is verified the paths of the step before are still there.
    """
    no_pause(engine, monkeypatch)
    monkeypatch.setattr(engine.speculator, "pad_rows", pad)
    if current_platform.is_cpu():
        vary(engine, monkeypatch)
    texts, requests = every_case(1)
    Checker()(engine, requests, reference("every case once", requests, texts), texts)
    if current_platform.is_cpu():
        assert len({budget for _, budget in verified}) > 5
        assert any(budget == 0 for drafted, budget in verified if drafted)


@on_the_host
def test_trees_that_do_not_pay_leave_plain_steps(engine, reference, monkeypatch, verified):
    no_pause(engine, monkeypatch)
    manager = engine.runner.adaptive_verification
    monkeypatch.setattr(manager.controller, "budget", lambda *_: PLAIN)
    Checker()(engine, half_sampled(), reference("half sampled", half_sampled()))
    # While prompts come, steps are not weighed.
    assert len(verified) > 20 and sum(drafts > 0 for drafts, _ in verified) < len(verified) / 4


@on_the_host
def test_one_block_or_both(engine, monkeypatch):
    """A proposal of one block is as deep as that, and the host knows which nodes are later."""
    no_pause(engine, monkeypatch)
    vary(engine, monkeypatch)
    policy, manager = engine.speculator.draft_policy, engine.runner.adaptive_verification
    depths: dict[bool, list[int]] = {False: [], True: []}

    def note(_, slots, tree, *__):
        depths[policy.drafters[0].brief].append(int(tree.depth.max()))

    note_calls(monkeypatch, speculator, "store_trees", note)
    later = note_calls(monkeypatch, manager.controller, "budget", lambda *x: bool(x[-1].any()))
    engine.generate(PROMPTS[:2], params(2, temperature=0.0, max_tokens=30))
    assert max(depths[True]) == 4 < max(depths[False])
    assert len(set(later)) == 2


@on_the_host
def test_experiments_leave_room_for_the_logits(engine, monkeypatch, verified):
    """vLLM samples in one piece what the device has shared out."""
    no_pause(engine, monkeypatch)
    vary(engine, monkeypatch)
    manager = engine.runner.adaptive_verification
    monkeypatch.setattr(manager, "_max_total_logits", 20)
    engine.generate(PROMPTS[:4], params(4, temperature=0.0, max_tokens=30))
    rows = [budget + drafted // 24 for drafted, budget in verified]  # a root each
    assert max(rows) == 20


@pytest.fixture(scope="module")
def crowded():
    both = {"second_drafter": EAGLE3, "draft_policy": "merge"}
    adaptive = {"num_speculative_tokens": 16, "enable_adaptive_verification": True}
    return crowded_engine(both | adaptive)


@on_the_host
def test_costs_are_known_before_the_first_request(crowded):
    cost, speculator = crowded.runner.adaptive_verification.controller.cost, crowded.speculator
    assert cost.verify.places[-1] == 96, "the most tokens of a step were not measured"
    found = cost.verify(np.array([1, 17, 96]))
    assert (found > 0).all() and (np.diff(found) >= 0).all() and found[2] > found[0]
    assert min(cost.draft(1), cost.draft(8)) > 1e-3
    learned = speculator.counters.total, speculator.adaptive.acceptance.seen.judged
    assert not any(x.any() for x in learned)


@on_the_host
def test_preemption_while_drafting_is_paused(crowded, reference, monkeypatch):
    """Drafters read the missed rows of a preempted request with its recomputed prompt."""
    manager, steps = crowded.runner.adaptive_verification, itertools.count()
    monkeypatch.setattr(manager.controller, "drafts", lambda *_: next(steps) % 16 < 2)
    slots, backlog = crowded.runner.req_states.req_id_to_index, crowded.speculator.skipped.backlog

    def note(_, request, *__, **___) -> bool:
        return manager.all_paused and backlog.rows(slots[request.request_id]) > 0

    missed = note_calls(monkeypatch, crowded.core.scheduler, "_preempt_request", note)
    requests = to_the_limit()
    Checker()(crowded, requests, reference("to the limit", requests))
    assert any(missed), "no request was preempted while its drafter had missed rows"
    while crowded.core.scheduler.has_requests():
        crowded.core.step()
    assert not backlog.bytes, "rows of requests that ended are kept"


@pytest.fixture(scope="module")
def scheduled():
    """Whole trees for up to two requests, their best three nodes for up to five, then none."""
    return make_engine(
        {
            "num_speculative_tokens": 10,
            "num_speculative_tokens_per_batch_size": [[1, 2, 10], [3, 5, 3], [6, 8, 0]],
            "calibrate_drafts": False,  # reproducible drafts
        }
    )


def test_vllms_own_schedule_by_batch_size(scheduled, reference, monkeypatch):
    counts, propose = set(), scheduled.speculator.propose
    parent = scheduled.speculator.tree_states.parent
    drafted = note_calls(
        monkeypatch, speculator, "store_trees", lambda _, slots, *__: (parent[slots] >= 0).sum(1)
    )
    read = note_calls(monkeypatch, scheduled.speculator.draft_policy, "advance", lambda *_: "rows")

    def noting(batch, *args, num_speculative_tokens, **kwargs):
        before = len(drafted), len(read)
        tokens = propose(batch, *args, num_speculative_tokens=num_speculative_tokens, **kwargs)
        counts.add((num_speculative_tokens, len(drafted) - before[0], len(read) - before[1]))
        return tokens

    monkeypatch.setattr(scheduled.speculator, "propose", noting)
    Checker()(scheduled, half_sampled(), reference("half sampled", half_sampled()))
    # On a GPU, a drafter with a cache reads every step.
    follows = 0 if current_platform.is_cpu() else 1
    assert counts == {(10, 1, 1), (3, 1, 1), (0, 0, follows)}
    assert max(int(nodes.max()) for nodes in drafted[-20:]) == 10


@on_the_host
def test_steps_are_observed_as_they_were(engine, reference, monkeypatch, verified):
    """What the controller learns from, with pauses of three steps in nine."""
    no_pause(engine, monkeypatch)
    controller, seen, prompts = engine.runner.adaptive_verification.controller, [], []
    turn = itertools.count()
    monkeypatch.setattr(controller, "drafts", lambda *_: next(turn) % 9 < 6)
    monkeypatch.setattr(controller, "observe", lambda step, sampling: seen.append(step))
    monkeypatch.setattr(controller, "observe_prompts", lambda *given: prompts.append(given))
    requests = params(temperature=0.0, max_tokens=120)
    requests[0].max_tokens = 10  # and prompts that come while there are drafts
    Checker()(engine, requests, reference("timed", requests))
    plain, drafted = ([step for step in seen if step.trees == trees] for trees in (False, True))
    assert len(drafted) > 8 and len(plain) > 8 and prompts
    assert all(step.rows == step.requests and step.accepted == 0 for step in plain)
    assert all(0 <= step.accepted <= step.rows - step.requests for step in drafted)
    assert max(step.accepted / step.requests for step in drafted) > 1
    assert all(step.seconds > step.draft_seconds > 0 for step in seen if step.drafted)
    assert any(step.read for step in seen if step.drafted and not step.trees), "missed rows"


@on_the_host
def test_prompts_are_not_read_where_a_batch_has_no_gain(engine, reference, monkeypatch):
    no_pause(engine, monkeypatch)
    controller, prompts = engine.runner.adaptive_verification.controller, []
    monkeypatch.setattr(controller, "stops", lambda *_: True)
    monkeypatch.setattr(controller, "observe_prompts", lambda *given: prompts.append(given))
    Checker()(engine, half_sampled(), reference("half sampled", half_sampled()))
    assert not prompts


@on_the_host
def test_rest_ends_when_drafting_pays_again(engine, monkeypatch, verified):
    charge(engine, monkeypatch, lambda rows: 1 + 1e-6 * rows, drafting=100.0)
    engine.generate(PROMPTS[:2], params(2, temperature=0.0))
    assert engine.speculator.adaptive.all_paused
    charge(engine, monkeypatch, lambda rows: 1 + 1e-6 * rows)
    verified.clear()
    engine.generate(PROMPTS[:2], params(2, temperature=0.0))
    assert sum(budget > 0 for _, budget in verified) > 5
