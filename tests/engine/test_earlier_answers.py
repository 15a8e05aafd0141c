"""What an engine learns from earlier requests: fewer steps, sharper scores, the same tokens."""

from __future__ import annotations

import itertools
import time

import pytest
from support.engines import KINDS, Engine, shared_engine
from support.matrix import PROMPTS, params
from vllm import SamplingParams

METRICS = {"per_request_spec_decode_metrics": "summary"}
NODES = 12


def kept(engine: Engine) -> list[int]:
    """Return the tokens of earlier answers."""
    while engine.core.scheduler.has_requests():
        engine.core.step()
    (drafter,) = engine.speculator.draft_policy.drafters
    return [token for token in drafter.earlier.tolist() if token >= 0]


@pytest.fixture
def ngram() -> Engine:
    engine = shared_engine({**KINDS["n-gram"], "num_speculative_tokens": NODES}, **METRICS)
    kept(engine)
    engine.speculator.forget_warm_up()
    return engine


def answers_of(engine: Engine, **extra) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, and the steps with drafts that all of them took."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
    params.extra_args = extra or None
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [each.outputs[0] for each in engine.llm.generate(prompts, params, use_tqdm=False)]
    metrics = [each.spec_decode_metrics for each in outputs]
    return [list(each.token_ids) for each in outputs], sum(sum(m.histogram) for m in metrics)


@pytest.mark.parametrize("kind", ["n-gram", "trie"])
def test_a_repeated_question_takes_fewer_steps(plain, kind):
    """Unless the first request declines, or the prefix cache is reset in between."""
    engine = shared_engine({**KINDS[kind], "num_speculative_tokens": NODES}, **METRICS)
    tokens, first = answers_of(engine, specblock_share=0)
    assert answers_of(engine, specblock_share=False)[1] == first
    answers_of(engine)
    repeated, fewer = answers_of(engine)
    assert fewer < 0.6 * first
    assert repeated == tokens
    assert engine.llm.reset_prefix_cache()
    assert answers_of(engine, specblock_share=0)[1] == first
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
    assert [each.tokens for (each,) in plain.generate(PROMPTS, params)] == tokens


def test_a_preempted_request_is_kept_once(ngram, monkeypatch):
    """Of an answer that was read again, only what followed."""
    scheduler, steps = ngram.core.scheduler, itertools.count()
    schedule = scheduler.schedule

    def preempting(*args, **kwargs):
        if scheduler.running and next(steps) % 4 == 3:
            scheduler._preempt_request(scheduler.running.pop(0), time.monotonic())
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    tokens = sum(map(len, answers_of(ngram)[0]))
    assert tokens <= len(kept(ngram)) <= tokens + NODES * len(PROMPTS)
    assert next(steps) > 40


def test_a_reset_forgets_the_requests_that_end_with_it(ngram):
    """By any name."""
    llm = ngram.llm.llm_engine
    llm.add_request("~ÿ", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=9))
    while llm.has_unfinished_requests():
        llm.step()
    assert ngram.llm.reset_prefix_cache() and not kept(ngram)


def test_an_answer_to_a_salted_prompt_is_not_kept(ngram):
    """Unless the request asks for it."""
    prompt, params = {"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}, SamplingParams()
    for params.extra_args in (None, {"specblock_share": 1}):
        ngram.llm.generate([prompt], params, use_tqdm=False)
        assert bool(kept(ngram)) == bool(params.extra_args)


def serve(engine, plain, temperature: float) -> None:
    """A few answers, each of which has to be vLLM's own."""
    sampling = params(4, temperature=temperature, max_tokens=48)
    assert engine.generate(PROMPTS[:4], sampling) == plain.generate(PROMPTS[:4], sampling)


def test_a_trained_drafter_is_found_to_be_too_flat_for_a_greedy_target(tree, plain):
    (head,) = tree.speculator.draft_policy.drafters
    assert head.calibration.trees.tolist() == [0, 0], "learned before anyone asked"
    serve(tree, plain, 0.0)
    greedy, sampling = head.calibration.trees.tolist()
    assert greedy > 20 and sampling == 0
    assert head.calibration.log[0].exp() > 1.3
    # What is counted for `/metrics` began at 1.5 and went where the learned one is by now.
    counts = tree.speculator.counters.as_dict()
    assert 1.3 < counts["calibration_thousandths", 1] / 1000 / counts["drafted_trees", 1] < 4
    serve(tree, plain, 1.0)
    assert head.calibration.trees[1] > 20
