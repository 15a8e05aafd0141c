"""Thinking budgets: the forced end is at the same token as in plain vLLM."""

from __future__ import annotations

import pytest
from support.engines import Engine, make_engine
from support.matrix import PROMPTS, Checker
from vllm import SamplingParams

check = Checker()

MARKERS = {"reasoning_start_str": "class", "reasoning_end_str": "return self"}


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """Plain vLLM, and trees of a fixed size."""
    return tuple(
        make_engine(speculative, reasoning_config=MARKERS)
        for speculative in (None, {"num_speculative_tokens": 12})
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_forced_where_plain_vllm_forces_it(engines, temperature):
    plain, tree = engines
    ids = plain.llm.get_tokenizer().encode
    start, end = (ids(text, add_special_tokens=False) for text in MARKERS.values())
    assert len(end) > 1
    texts = [[*text[:50], *start] for text in PROMPTS]
    budgets = [0, 1, 7, 16, 30, None, 7, 3, 100, 12]
    requests = [
        SamplingParams(
            temperature=temperature,
            seed=at,
            max_tokens=40,
            ignore_eos=True,
            thinking_token_budget=budget,
        )
        for at, budget in enumerate(budgets)
    ]
    expected = plain.generate(texts, requests)
    check(tree, requests, expected, texts)
    for budget, (answer,) in zip(budgets, expected):
        unforced = answer.tokens[:budget]
        if budget is not None and budget < 30 and not {*start, *end} & {*unforced}:
            assert answer.tokens[budget : budget + len(end)] == end
