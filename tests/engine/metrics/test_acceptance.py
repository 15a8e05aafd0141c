"""Reported τ, compared with the tokens emitted in each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.engines import Engine, make_engine, note_calls, prompts, record_preemptions
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from vllm_specblock.engine.metrics.acceptance import acceptance_length_of
from vllm_specblock.engine.offline.answering import read_counters

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
NODES = 12
PROMPTS = [each[:20] * 3 for each in prompts(6)]  # repetitive, hence easy to draft
ENDS = {
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "max_tokens 60": {"max_tokens": 60},
    "stop token": {"max_tokens": 60, "stop_token_ids": list(range(3, 400, 7))},
    "stop string": {"max_tokens": 60, "stop": ["e", "s", "\n"]},
    "eos": {"max_tokens": 60, "ignore_eos": False, "logit_bias": {1: 7.0, 2: 7.0}},
}


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
    assert acceptance_length_of([seen.counters]) == pytest.approx(seen.tau)
    for where, metrics in seen.metrics.items():
        steps = seen.given[where][1:]
        true = sum(steps) / len(steps) if steps else 1.0
        assert metrics["mean_acceptance_length"] == pytest.approx(true)
        assert metrics.get("per_step_accepted", []) == [tokens - 1 for tokens in steps]


@pytest.fixture(scope="module", params=["fixed", "adaptive, asynchronous"])
def engine(request):
    adaptive = request.param != "fixed"
    return make_engine(
        {"num_speculative_tokens": NODES, "enable_adaptive_verification": adaptive},
        per_request_spec_decode_metrics="detailed",
        async_scheduling="async" in request.param,
    )


fixed_trees = pytest.mark.parametrize("engine", ["fixed"], indirect=True)


@pytest.fixture
def pause(engine, monkeypatch):
    """Pause or resume drafting from the next step on."""
    controller = engine.runner.adaptive_verification.controller

    def pause(paused: bool) -> None:
        monkeypatch.setattr(controller, "drafts", lambda *_: not paused)

    return pause


adaptive_trees = pytest.mark.parametrize("engine", ["adaptive, asynchronous"], indirect=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("end", ENDS)
def test_reported_tau(engine, end, temperature):
    seen = run(engine, params(temperature=temperature, **ENDS[end]))
    check(seen)
    assert len(seen.given) == len(PROMPTS)
    # A request that ends at a stop string gets no metrics.
    assert len(seen.metrics) == len(PROMPTS) or end == "stop string"
    if engine.runner.adaptive_verification is not None or end in ("max_tokens 1", "stop string"):
        return
    # vLLM's own counters stop at the end.
    assert seen.counters[DRAFTS] == seen.steps
    assert 1 + seen.counters.get(ACCEPTED, 0) / seen.counters[DRAFTS] == pytest.approx(seen.tau)
    # A tree's slots count as drafts, whether a node is in them or not.
    for where, metrics in seen.metrics.items():
        assert metrics["num_draft_tokens"] == NODES * (len(seen.given[where]) - 1)


@fixed_trees
def test_a_stop_inside_an_accepted_path(engine):
    """max_tokens cuts the last token of an accepted path."""
    steps = run(engine, params(1, temperature=0.0, max_tokens=60), PROMPTS[:1]).given["0", 0]
    ends = [sum(steps[: at + 1]) - 1 for at, tokens in enumerate(steps) if tokens > 2]
    assert len(ends) > 3, "too few accepted drafts to test"
    for end in ends[:4]:
        seen = run(engine, params(1, temperature=0.0, max_tokens=end), PROMPTS[:1])
        assert sum(seen.given["0", 0]) == end and seen.given["0", 0][-1] > 1
        assert seen.counters[ACCEPTED] == end - 1 - seen.steps
        check(seen)


def test_sequences_and_aborted_requests(engine):
    seen = run(engine, params(3, n=2, temperature=0.8, max_tokens=30), aborted=("1",))
    assert len(seen.given) == 6 and len(seen.given["1", 0]) < len(seen.given["0", 0])
    check(seen)


def count_drafts(output, *_) -> int:
    """Return the drafts that are scheduled in a step."""
    return sum(map(len, output.scheduled_spec_decode_tokens.values()))


@adaptive_trees
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_paused_drafting_schedules_and_counts_no_drafts(engine, pause, monkeypatch, temperature):
    pause(True)
    run(engine, params(temperature=temperature, max_tokens=10))
    drafts = note_calls(monkeypatch, engine.core.scheduler, "schedule", count_drafts)
    seen = run(engine, params(temperature=temperature, max_tokens=40))
    # A GPU's drafters cannot read prompts later: they read them at once, and draft one tree.
    trees, first, least = (0, 0, 40) if current_platform.is_cpu() else (len(PROMPTS), 4, 30)
    assert seen.counters.get(DRAFTS, 0) == trees and not any(drafts[first:])
    assert (seen.tau == 1.0 or trees) and len(drafts) >= least
    check(seen)


@adaptive_trees
def test_drafting_resumes_after_a_pause(engine, pause, monkeypatch):
    """The same requests get drafts again, and the same tokens."""
    requests = params(temperature=0.0, max_tokens=60)
    pause(False)
    expected = engine.generate(PROMPTS, requests)
    turn = iter(range(10**6))
    pause(True)
    controller = engine.runner.adaptive_verification.controller
    monkeypatch.setattr(controller, "drafts", lambda *_: not 4 <= next(turn) < 12)
    drafts = note_calls(monkeypatch, engine.core.scheduler, "schedule", count_drafts)
    answers = engine.generate(PROMPTS, requests)
    assert [a.tokens for (a,) in answers] == [a.tokens for (a,) in expected]
    paused = drafts.index(0, 3)
    assert all(drafts[1:3]) and any(drafts[paused:]), "paused, and drafted again"
    assert drafts[paused:].count(0) >= 7
    turn = iter(range(10**6))
    check(run(engine, requests))


def test_preempted_requests():
    crowded = make_engine(
        {"num_speculative_tokens": NODES},
        max_num_batched_tokens=96,
        num_gpu_blocks_override=24,
        max_model_len=256,
        per_request_spec_decode_metrics="detailed",
    )
    preempted = record_preemptions(crowded)
    seen = run(crowded, params(temperature=0.0, max_tokens=150))
    assert preempted
    check(seen)
