"""Prompts of thousands of tokens, in chunks, with RoPE scaled beyond the trained length."""

from __future__ import annotations

import random

import pytest
from support.engines import assert_identical, make_engine
from support.matrix import params

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
SETTINGS = {
    "hf_overrides": {
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000.0, **YARN},
    },
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    draw = random.Random(3)
    unit = [draw.randrange(3, 2048) for _ in range(37)]
    to_the_limit = (unit * 111)[: 4096 - 24]
    return [to_the_limit, [draw.randrange(3, 2048) for _ in range(2100)], [7] * 1200]


@pytest.fixture(scope="module")
def expected(texts):
    plain = make_engine(None, **SETTINGS)
    return [plain.generate(texts, params(3, temperature=heat, max_tokens=24)) for heat in (0, 1)]


@pytest.mark.parametrize("drafter", [{"kind": "ngram", "model": None}, {}], ids=["ngram", "heads"])
def test_long_prompts_in_chunks(texts, expected, drafter):
    engine = make_engine({"num_speculative_tokens": 12, **drafter}, **SETTINGS)
    # A lookup reads no states.
    assert engine.runner.use_aux_hidden_state_outputs != ("kind" in drafter)
    for heat, outputs in zip((0, 1), expected):
        ours = engine.generate(texts, params(3, temperature=heat, max_tokens=24))
        assert assert_identical(ours, outputs).tokens == 72
    metrics = {metric.name: metric for metric in engine.llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value > 20
