"""LoRA adapters on the target: two of them and requests without any, in one batch of trees."""

from __future__ import annotations

import pytest
import torch
from support.adapters import LORA, in_turn
from support.engines import make_engine
from support.matrix import PROMPTS, params
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in checks/check_engines.py")

# vLLM's kernels for CPUs copy an adapter for every token: the shorter prompts will do.
TEXTS = sorted(PROMPTS, key=len)[:6]


@pytest.fixture(scope="module")
def engines():
    """Ours, and vLLM without us, once its kernels leave requests without an adapter alone."""
    return [make_engine(given, **LORA) for given in ({"num_speculative_tokens": 24}, None)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_vllms_own(engines, reference, temperature, tmp_path):
    requests = params(len(TEXTS), temperature=temperature, max_tokens=50)
    counters, adapters = engines[0].speculator.counters, in_turn(tmp_path, len(TEXTS))
    before = counters.as_dict()["accepted_nodes", 1]
    got, expected = (engine.generate(TEXTS, requests, adapters) for engine in engines)
    assert got == expected
    without = reference(f"without adapters, {temperature}", requests, TEXTS)
    for mine, base, adapter in zip(got, without, adapters):
        assert (mine == base) == (adapter is None), "adapters change what is said"
    accepted = counters.as_dict()["accepted_nodes", 1] - before
    assert accepted > 40, "hardly a tree was right: this tested little"


def test_rows_that_vllm_maps_to_no_adapter(engines):
    with pytest.raises(VLLMValidationError, match="prompt_logprobs is set"):
        engines[0].generate(TEXTS[:1], params(1, prompt_logprobs=1))
