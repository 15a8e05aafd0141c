"""Reported τ, compared with the tokens emitted in each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from support.engines import Engine, make_engine, note_calls, prompts, record_preemptions
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from vllm_specblock.engine.metrics.acceptance import STEPS, TOKENS, acceptance_length
from vllm_specblock.engine.offline.answering import Answering, read_counters

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
NODES = 12
PROMPTS = [each[:20] * 3 for each in prompts(6)]  # repetitive, hence easy to draft
ENDS = (
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 60},
    {"max_tokens": 60, "stop_token_ids": list(range(3, 400, 7))},
    {"max_tokens": 60, "ignore_eos": False, "logit_bias": {1: 7.0, 2: 7.0}},
)
STOPS = {"max_tokens": 60, "stop": ["e", "s", "\n"]}
"""A request that ends at a stop string gets no metrics."""


@dataclass
class Seen:
    """By (request, sequence), tokens emitted in each step and vLLM's metrics; growing counters."""

    given: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[tuple[str, int], dict] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return sum(len(each) - 1 for each in self.given.values())

    @property
    def tau(self) -> float:
        emitted = sum(sum(each[1:]) for each in self.given.values())
        return emitted / self.steps if self.steps else 1.0


def run(engine: Engine, params: Sequence[SamplingParams], texts=PROMPTS, aborted=()) -> Seen:
    seen, llm = Seen(), engine.llm.llm_engine
    before = read_counters(engine.llm.get_metrics())
    for index, (text, each) in enumerate(zip(texts, params)):
        each.output_kind = RequestOutputKind.DELTA
        llm.add_request(str(index), {"prompt_token_ids": text}, each)
    while llm.has_unfinished_requests():
        for output in llm.step():
            for sequence in output.outputs:
                where = output.request_id, sequence.index
                if sequence.token_ids:
                    seen.given[where].append(len(sequence.token_ids))
                if sequence.spec_decode_metrics is not None:
                    seen.metrics[where] = sequence.spec_decode_metrics.to_dict()
                if where[0] in aborted and len(seen.given[where]) == 3:
                    llm.abort_request([where[0]])
    seen.counters = read_counters(engine.llm.get_metrics()) - before
    return seen


def params(count: int = len(PROMPTS), **more) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": i, "ignore_eos": True} | more) for i in range(count)]


def check(seen: Seen) -> None:
    """Compare every reported τ with the emitted tokens."""
    assert acceptance_length(seen.counters) == pytest.approx(seen.tau)
    for where, metrics in seen.metrics.items():
        steps = seen.given[where][1:]
        true = sum(steps) / len(steps) if steps else 1.0
        assert metrics["mean_acceptance_length"] == pytest.approx(true)
        assert metrics.get("per_step_accepted", []) == [tokens - 1 for tokens in steps]


@pytest.fixture(scope="module", params=["fixed", "adaptive, asynchronous"])
def engine(request, plain):
    """vLLM's counters are those of the newest engine: `plain` has to be there before.

    Fixed trees have a cache for six requests of 120 tokens, and not of 210.
    """
    adaptive = request.param != "fixed"
    return make_engine(
        {"num_speculative_tokens": NODES, "enable_adaptive_verification": adaptive},
        per_request_spec_decode_metrics="detailed",
        async_scheduling=adaptive,
        num_gpu_blocks_override=None if adaptive else 33,
    )


fixed_trees = pytest.mark.parametrize("engine", ["fixed"], indirect=True)
adaptive_trees = pytest.mark.parametrize("engine", ["adaptive, asynchronous"], indirect=True)


def pause(engine, monkeypatch, when) -> None:
    """Pause drafting after the steps for whose number `when` is true."""
    controller, steps = engine.runner.adaptive_verification.controller, count()
    monkeypatch.setattr(controller, "drafts", lambda *_: not when(next(steps)))
    monkeypatch.setattr(controller, "stops", lambda *_: False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_reported_tau(engine, temperature):
    check(run(engine, params(temperature=temperature, **STOPS)))
    ends = [ENDS[at % len(ENDS)] for at in range(len(PROMPTS))]
    seen = run(engine, [params(1, temperature=temperature, **end)[0] for end in ends])
    check(seen)
    assert len(seen.given) == len(seen.metrics) == len(PROMPTS)
    if engine.runner.adaptive_verification is not None:
        return
    # vLLM's own counters stop at the end.
    assert seen.counters[DRAFTS] == seen.steps
    assert 1 + seen.counters.get(ACCEPTED, 0) / seen.counters[DRAFTS] == pytest.approx(seen.tau)
    # A tree's slots count as drafts, whether a node is in them or not.
    for where, metrics in seen.metrics.items():
        assert metrics["num_draft_tokens"] == NODES * (len(seen.given[where]) - 1)


def test_sequences_and_aborted_requests(engine):
    seen = run(engine, params(3, n=2, temperature=0.8, max_tokens=30), aborted=("1",))
    assert len(seen.given) == 6 and len(seen.given["1", 0]) < len(seen.given["0", 0])
    check(seen)


@fixed_trees
def test_steps_of_an_offline_answer_add_up(engine, plain):
    answering = Answering.__new__(Answering)
    answering.llm, answering.stopwatch = engine.llm, None
    job = {"prompts": [[5, 6, 7, 8] * 3, [9, 10, 11] * 5], "seeds": [3, 4]}
    job |= {"temperature": 0.8, "max_tokens": 30, "ignore_eos": True}
    said: list[list[list[int]]] = [[], []]
    found = answering.answer(job, lambda index, new: said[index].append(new))
    assert [[token for new in steps for token in new] for steps in said] == found["ids"]
    assert [len(ids) for ids in found["ids"]] == [30, 30]
    # A step says all that was accepted in it; the prompt's is not a decode step.
    steps, counters = sum(map(len, said)) - 2, found["counters"]
    assert counters[STEPS] == counters[DRAFTS] == steps
    assert counters[TOKENS] == 60 and counters[ACCEPTED] == 60 - 2 - steps
    assert acceptance_length(counters) == (60 - 2) / steps
    assert found["wall"] > 0 and found["cpu"] > 0
    for other in (engine, plain):
        answering.llm = other.llm
        assert answering.answer(job)["ids"] == found["ids"]


@fixed_trees
def test_preempted_requests(engine):
    preempted = record_preemptions(engine)
    check(run(engine, params(temperature=0.0, max_tokens=150)))
    assert preempted


def count_drafts(output, *_) -> int:
    """Return the drafts that are scheduled in a step."""
    return sum(map(len, output.scheduled_spec_decode_tokens.values()))


@adaptive_trees
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_paused_drafting_schedules_and_counts_no_drafts(engine, monkeypatch, temperature):
    pause(engine, monkeypatch, lambda step: True)
    run(engine, params(temperature=temperature, max_tokens=10))
    drafts = note_calls(monkeypatch, engine.core.scheduler, "schedule", count_drafts)
    seen = run(engine, params(temperature=temperature, max_tokens=40))
    # A GPU's drafters cannot read prompts later: they read them at once, and draft one tree.
    trees, first, least = (0, 0, 40) if current_platform.is_cpu() else (len(PROMPTS), 4, 30)
    assert seen.counters.get(DRAFTS, 0) == trees and not any(drafts[first:])
    assert (seen.tau == 1.0 or trees) and len(drafts) >= least
    check(seen)


@adaptive_trees
def test_drafting_resumes_after_a_pause(engine, monkeypatch):
    """The same requests get drafts again, and the same tokens."""
    requests = params(temperature=0.0, max_tokens=60)
    pause(engine, monkeypatch, lambda step: False)
    expected = engine.generate(PROMPTS, requests)
    pause(engine, monkeypatch, lambda step: 4 <= step < 12)
    drafts = note_calls(monkeypatch, engine.core.scheduler, "schedule", count_drafts)
    answers = engine.generate(PROMPTS, requests)
    assert [a.tokens for (a,) in answers] == [a.tokens for (a,) in expected]
    paused = drafts.index(0, 3)
    assert all(drafts[1:3]) and any(drafts[paused:]), "paused, and drafted again"
    assert drafts[paused:].count(0) >= 7
    pause(engine, monkeypatch, lambda step: 4 <= step < 12)
    check(run(engine, requests))
