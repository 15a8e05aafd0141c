"""Targets in 4 bits on a CPU are verified as trees: their tokens are vLLM's own."""

from __future__ import annotations

import pytest
import torch
from support.engines import make_engine
from support.matrix import PROMPTS, params
from support.quantised import write_quantised

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="other kernels on a GPU")


@pytest.mark.parametrize("form", ["awq", "gptq", "int4"])
def test_tokens_are_vllms_own(form, tmp_path):
    """In half precision, the longer one of the two that vLLM has for these formats."""
    target = write_quantised(tmp_path / "target", form)
    plain, ours = (
        make_engine(speculative, model=str(target), dtype="float16")
        for speculative in (None, {"num_speculative_tokens": 16})
    )
    for temperature in (0.0, 1.0):
        requests = params(4, temperature=temperature, max_tokens=40)
        assert ours.generate(PROMPTS[:4], requests) == plain.generate(PROMPTS[:4], requests)
    accepted = ours.speculator.counters.as_dict()["accepted_nodes_1"]
    assert accepted > 40, "hardly a draft was right"
