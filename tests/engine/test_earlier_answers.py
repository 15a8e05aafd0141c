"""Answers of earlier requests serve later ones: fewer steps, the same tokens."""

from __future__ import annotations

import pytest
from support.engines import KINDS, Engine, shared_engine
from support.matrix import PROMPTS
from vllm import SamplingParams

METRICS = {"per_request_spec_decode_metrics": "summary"}


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
    engine = shared_engine({**KINDS[kind], "num_speculative_tokens": 12}, **METRICS)
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
