"""`max_model_len` "auto" (−1): vLLM fits the limit to the cache after building the drafters."""

from __future__ import annotations

import pytest
from support.engines import assert_identical, make_engine
from support.matrix import PROMPTS
from vllm import SamplingParams

from vllm_specblock.drafters.common.synthetic import SyntheticDrafter

RATES = {
    "rejection_sample_method": "synthetic",
    "num_speculative_tokens": 4,
    "synthetic_acceptance_rates": [0.9, 0.5, 0.2, 0.1],
}


@pytest.mark.parametrize(
    "speculative",
    [{}, {"kind": "ngram", "model": None}, RATES],
    ids=["specblock", "ngram", "imposed"],
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
    if isinstance(drafter, SyntheticDrafter):
        assert drafter.drafter.max_model_len == limit
        return
    texts = [text for text in PROMPTS if len(text) < limit]
    to_the_limit = [
        SamplingParams(temperature=0, max_tokens=limit - len(text), ignore_eos=True)
        for text in texts
    ]
    assert_identical(engine.generate(texts, to_the_limit), plain.generate(texts, to_the_limit))
