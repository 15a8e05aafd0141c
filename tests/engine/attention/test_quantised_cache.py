"""KV caches of 8 bits on a CPU: prompts by vLLM's kernel, trees by ours, and vLLM's own tokens."""

from __future__ import annotations

import pytest
import torch
from support.engines import make_engine
from support.matrix import PROMPTS, Checker, params

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not torch.cpu._is_avx512_supported(),
    reason="vLLM has them on CPUs with AVX-512; on a GPU they are refused",
)


def test_tokens_are_vllms_own(reference):
    plain = make_engine(None, kv_cache_dtype="fp8")
    ours = make_engine({"num_speculative_tokens": 24}, kv_cache_dtype="fp8")
    ((_, caches),) = ours.speculator.caches.target
    assert caches.caches[0].element_size() == 1 and caches.packing is not None
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        requests = params(temperature=temperature)
        expected = plain.generate(PROMPTS, requests)
        said = [answer.tokens for (answer,) in reference(name, requests)]
        assert [answer.tokens for (answer,) in expected] != said, "8 bits make a difference"
        Checker()(ours, requests, expected)
    accepted = ours.speculator.counters.as_dict()["accepted_nodes_1"]
    assert accepted > 400, "hardly a draft was right"
