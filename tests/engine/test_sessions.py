"""Streaming-input sessions (`resumable` requests) give the same tokens as without drafts."""

from __future__ import annotations

import time
from itertools import count

import pytest
from support.engines import Engine, asynchronous_engine, shared_engine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

TEXTS = (
    "Once upon a time there was a small",
    "The user wants to know how many times",
    " and then she said to the",
    "One day, Tom went to the park with his",
    " He was happy because the",
)
SESSIONS, CHUNKS = 27, 4
STOPS = (16, 201, 269, 14)
"""Frequent tokens of the target's answers, to stop inside accepted paths."""

Answer = tuple[tuple[int, ...], str]
_ids = count()


def sampling(session: int, chunk: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=2 + (3 * session + 5 * chunk) % 17,
        temperature=0.8 * (session % 2),
        seed=session,
        stop_token_ids=list(STOPS) if session % 3 else None,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def run(engine: Engine) -> list[list[Answer]]:
    """Return the answers of every session, chunk by chunk.

    Odd sessions send a chunk once the last one is answered; even sessions send all at once.
    """
    llm, tokenizer = engine.llm.llm_engine, engine.llm.get_tokenizer()
    texts = [tokenizer.encode(text) for text in TEXTS]
    answers: dict[str, list[Answer]] = {}
    waiting = {}
    said: dict[str, list[int]] = {}

    def request(name: str, tokens: list[int], params: SamplingParams, resumable: bool):
        made = llm.input_processor.process_inputs(
            request_id=name,
            prompt={"prompt_token_ids": list(tokens)},
            params=params,
            supported_tasks=("generate",),
            resumable=resumable,
        )
        made.external_req_id = name
        return made

    def start(session: int) -> None:
        name = f"session {next(_ids)}"
        answers[name], said[name] = [], []
        chunks = [
            request(name, texts[(session + i) % len(texts)], sampling(session, i), True)
            for i in range(CHUNKS)
        ]
        at_once = chunks if session % 2 == 0 else chunks[:1]
        waiting[name] = chunks[len(at_once) :]
        for chunk in at_once:
            llm.engine_core.add_request(chunk)

    todo = list(range(SESSIONS))
    steps = count()
    while todo or any(len(each) < CHUNKS for each in answers.values()):
        assert next(steps) < 20_000, "a session was lost"
        while todo and sum(len(each) < CHUNKS for each in answers.values()) < 6:
            start(todo.pop(0))
        for output in llm.engine_core.get_output().outputs:
            name = output.request_id
            said[name] += output.new_token_ids
            if output.finish_reason is None:
                continue
            answers[name].append((tuple(said[name]), str(output.finish_reason)))
            said[name] = []
            if waiting[name]:
                llm.engine_core.add_request(waiting[name].pop(0))
            elif len(answers[name]) == CHUNKS:
                llm.engine_core.add_request(request(name, [3], sampling(0, 0), False))
    while engine.core.scheduler.has_requests():
        llm.engine_core.get_output()
    return list(answers.values())


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[Answer]]:
    return run(plain)


def assert_alive(engine: Engine) -> None:
    ((answer,),) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.tokens) == 4


def few_tokens_a_step() -> Engine:
    """Fewer than most chunks have."""
    return shared_engine({"num_speculative_tokens": 5}, max_num_batched_tokens=24, max_num_seqs=3)


@pytest.mark.parametrize("make", [few_tokens_a_step, asynchronous_engine])
def test_sessions_that_stop_inside_accepted_paths(make, expected):
    engine = make()
    assert run(engine) == expected
    assert_alive(engine)


def test_preempted_while_the_last_step_is_in_flight(expected, monkeypatch):
    """As if the cache were full in every third step. vLLM loses sessions by it."""
    engine = asynchronous_engine()
    scheduler, steps, in_flight = engine.core.scheduler, count(), []
    schedule = scheduler.schedule

    def preempting(*args, **kwargs):
        if scheduler.running and next(steps) % 3 == 0:
            request = scheduler.running.pop()
            in_flight.append(request.num_in_flight_tokens)
            scheduler._preempt_request(request, time.monotonic())
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    assert run(engine) == expected
    assert any(in_flight)
    monkeypatch.undo()
    assert_alive(engine)
