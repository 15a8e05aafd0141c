"""τ as it is told, held against what requests were given step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.engines import Engine, make_engine, prompts, record_preemptions
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_specblock.engine.metrics.acceptance import acceptance_length_of
from vllm_specblock.engine.offline.answering import grown, read_counters

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
NODES = 12
PROMPTS = [each[:20] * 3 for each in prompts(6)]  # of repetition, which is drafted well
ENDS = {
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "max_tokens 3": {"max_tokens": 3},
    "max_tokens 60": {"max_tokens": 60},
    "stop token": {"max_tokens": 60, "stop_token_ids": list(range(3, 400, 7))},
    "stop string": {"max_tokens": 60, "stop": ["e", "s", "\n"]},
    "eos": {"max_tokens": 60, "ignore_eos": False, "logit_bias": {1: 7.0, 2: 7.0}},
}


@dataclass
class Told:
    """A run.

    Attributes:
        given: (request, sequence) → tokens of each step.
        metrics: (request, sequence) → vLLM's per-request metrics.
        counters: by how much those of `read_counters` grew.
    """

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


def run(engine: Engine, params: Sequence[SamplingParams], texts=PROMPTS, aborted=()) -> Told:
    told, llm = Told(), engine.llm.llm_engine
    before = read_counters(engine.llm.get_metrics())
    for index, (text, each) in enumerate(zip(texts, params)):
        each.output_kind = RequestOutputKind.DELTA
        llm.add_request(str(index), {"prompt_token_ids": text}, each)
    while llm.has_unfinished_requests():
        for output in llm.step():
            for sequence in output.outputs:
                where = output.request_id, sequence.index
                if sequence.token_ids:
                    told.given[where].append(len(sequence.token_ids))
                if sequence.spec_decode_metrics is not None:
                    told.metrics[where] = sequence.spec_decode_metrics.to_dict()
                if where[0] in aborted and len(told.given[where]) == 3:
                    llm.abort_request([where[0]])
    told.counters = grown(before, read_counters(engine.llm.get_metrics()))
    return told


def params(count: int = len(PROMPTS), **more) -> list[SamplingParams]:
    return [SamplingParams(**{"seed": i, "ignore_eos": True} | more) for i in range(count)]


def check(told: Told) -> None:
    """Everything that tells τ tells the true one."""
    assert acceptance_length_of([told.counters]) == pytest.approx(told.tau)
    for where, metrics in told.metrics.items():
        steps = told.given[where][1:]
        true = sum(steps) / len(steps) if steps else 1.0
        assert metrics["mean_acceptance_length"] == pytest.approx(true)
        assert metrics.get("per_step_accepted", []) == [tokens - 1 for tokens in steps]


@pytest.fixture(scope="module", params=["fixed", "adaptive", "adaptive, asynchronous"])
def engine(request):
    adaptive = request.param != "fixed"
    return make_engine(
        {"num_speculative_tokens": NODES, "enable_adaptive_verification": adaptive},
        per_request_spec_decode_metrics="detailed",
        async_scheduling="async" in request.param,
    )


@pytest.fixture
def fixed(engine):
    if engine.runner.adaptive_verification is not None:
        pytest.skip("of fixed trees")
    return engine


@pytest.fixture
def pausing(engine, monkeypatch):
    """Pauses drafting, or drafts again, from the next step on."""
    manager = engine.runner.adaptive_verification
    if manager is None:
        pytest.skip("of adaptive trees")

    def pause(paused: bool) -> None:
        monkeypatch.setattr(manager.drafting_switch, "decide", lambda *_: paused)
        if hasattr(manager, "throughput"):
            monkeypatch.setattr(manager.throughput, "wants_plain", lambda *_: False)

    return pause


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("end", ENDS)
def test_told_tau_is_true(engine, end, temperature):
    told = run(engine, params(temperature=temperature, **ENDS[end]))
    check(told)
    assert len(told.given) == len(PROMPTS)
    # A request that a stop string ends is gone before its metrics come.
    assert len(told.metrics) == len(PROMPTS) or end == "stop string"


@pytest.mark.parametrize("end", ["max_tokens 2", "max_tokens 60", "stop token", "eos"])
def test_vllms_counters_have_no_tokens_behind_the_end(fixed, end):
    told = run(fixed, params(temperature=0.0, **ENDS[end]))
    assert told.counters[DRAFTS] == told.steps
    assert 1 + told.counters.get(ACCEPTED, 0) / told.counters[DRAFTS] == pytest.approx(told.tau)


def test_a_stop_inside_an_accepted_path(fixed):
    """max_tokens is one token short of a step of several."""
    steps = run(fixed, params(1, temperature=0.0, max_tokens=60), PROMPTS[:1]).given["0", 0]
    ends = [sum(steps[: at + 1]) - 1 for at, tokens in enumerate(steps) if tokens > 2]
    assert len(ends) > 3, "a target whose answers are not drafted shows nothing"
    for end in ends[:4]:
        told = run(fixed, params(1, temperature=0.0, max_tokens=end), PROMPTS[:1])
        assert sum(told.given["0", 0]) == end and told.given["0", 0][-1] > 1
        assert told.counters[ACCEPTED] == end - 1 - told.steps
        check(told)


def test_sequences_and_aborted_requests(engine):
    told = run(engine, params(3, n=2, temperature=0.8, max_tokens=30), aborted=("1",))
    assert len(told.given) == 6 and len(told.given["1", 0]) < len(told.given["0", 0])
    check(told)


def test_a_cached_prompt_is_not_drafted_for(fixed):
    """vLLM pads the one token that is left of it with placeholders of drafts."""
    text = prompts(8)[7][:65]
    fixed.generate([text], params(1, temperature=0.0, max_tokens=2))
    told = run(fixed, params(2, temperature=0.0, max_tokens=30), [PROMPTS[0], text])
    assert told.counters[DRAFTS] == told.steps
    check(told)


def scheduled_drafts(engine: Engine, monkeypatch) -> list[int]:
    """Drafts of every step that is scheduled from now on."""
    found, scheduler = [], engine.core.scheduler
    schedule = scheduler.schedule

    def noting(*args):
        output = schedule(*args)
        found.append(sum(map(len, output.scheduled_spec_decode_tokens.values())))
        return output

    monkeypatch.setattr(scheduler, "schedule", noting)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_paused_drafting_schedules_and_counts_no_drafts(engine, pausing, monkeypatch, temperature):
    pausing(True)
    run(engine, params(temperature=temperature, max_tokens=10))
    drafts = scheduled_drafts(engine, monkeypatch)
    told = run(engine, params(temperature=temperature, max_tokens=40))
    assert told.counters.get(DRAFTS, 0) == 0 and not any(drafts)
    assert told.tau == 1.0 and len(drafts) >= 40
    check(told)


def test_drafts_come_back_after_a_pause(engine, pausing, monkeypatch):
    """Within the same requests, and to the same tokens."""
    requests = params(temperature=0.0, max_tokens=60)
    pausing(False)
    expected = engine.generate(PROMPTS, requests)
    turn = iter(range(10**6))
    pausing(True)
    switch = engine.runner.adaptive_verification.drafting_switch
    monkeypatch.setattr(switch, "decide", lambda *_: 4 <= next(turn) < 12)
    drafts = scheduled_drafts(engine, monkeypatch)
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
    told = run(crowded, params(temperature=0.0, max_tokens=150))
    assert preempted
    check(told)
