"""Drafters in 8 bits serve: other drafts now and then, never other tokens."""

from __future__ import annotations

import pytest
from support.engines import ROOT, make_engine
from support.matrix import PROMPTS, params

from vllm_specblock.drafters.common.linear import Fp8Linear


@pytest.mark.parametrize(
    "options", [{}, {"model": str(ROOT / "examples/two_heads/eagle3")}], ids=["specblock", "eagle3"]
)
def test_tokens_stay_vllms_own(plain, options):
    engine = make_engine({"num_speculative_tokens": 20, "quantization": "fp8", **options})
    (head,) = engine.speculator.draft_policy.drafters
    assert isinstance(head.model.lm_head, Fp8Linear)
    accepted = []
    for heat in (0.0, 1.0):
        sampling = params(4, temperature=heat, max_tokens=40)
        assert engine.generate(PROMPTS[:4], sampling) == plain.generate(PROMPTS[:4], sampling)
        counts = engine.speculator.counters.as_dict()
        accepted.append(counts["accepted_nodes_1"])
    assert accepted[0] > 40, "hardly a draft was right"
