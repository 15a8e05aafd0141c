"""`max_model_len` "auto" (−1): vLLM fits the limit to the cache after building the drafters."""

from __future__ import annotations

import pytest
from support.engines import assert_identical, make_engine
from support.matrix import PROMPTS
from vllm import SamplingParams


@pytest.mark.parametrize(
    "speculative",
    [{}, {"kind": "ngram", "model": None}],
    ids=["specblock", "ngram"],
)
def test_drafters_take_the_fitted_limit(plain, speculative):
    engine = make_engine(
        {"num_speculative_tokens": 12, **speculative},
        max_model_len=-1,
        kv_cache_memory_bytes=1 << 20,
    )
    limit = engine.core.vllm_config.model_config.max_model_len
    assert limit < 512, "everything fits: nothing was tested"
    (drafter,) = engine.speculator.draft_policy.drafters
    assert drafter.max_model_len == limit
    texts = [text for text in PROMPTS if len(text) < limit]
    to_the_limit = [
        SamplingParams(temperature=0, max_tokens=limit - len(text), ignore_eos=True)
        for text in texts
    ]
    assert_identical(engine.generate(texts, to_the_limit), plain.generate(texts, to_the_limit))
