"""Targets of fewer bits on a CPU are verified as trees: in 4 bits the tokens are vLLM's own."""

from __future__ import annotations

import pytest
import torch
from support.engines import make_engine
from support.matrix import PROMPTS, params
from support.quantised import write_quantised

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="other kernels on a GPU")


FORMS = {
    "weights in 4 bits, AWQ": "awq",
    "weights in 4 bits, GPTQ": "gptq",
    "weights in 4 bits, compressed-tensors": "int4",
}
"""What the support table says of them → as `write_quantised` calls them."""


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM multiplies by 4 bits with AVX-512"
)
@pytest.mark.parametrize("form", FORMS.values())
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


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX, vLLM's int8 kernel takes no float32"
)
def test_int8_answers_leave_vllms_where_two_tokens_are_close(tmp_path):
    """Activations are rounded to 8 bits, by sums that a tree adds up in another order."""
    target = write_quantised(tmp_path / "target", "int8")
    plain, ours = (
        make_engine(speculative, model=str(target))
        for speculative in (None, {"num_speculative_tokens": 16})
    )
    requests = params(logprobs=2)
    gaps = []
    for (mine,), (other,) in zip(
        ours.generate(PROMPTS, requests), plain.generate(PROMPTS, requests)
    ):
        places = zip(mine.tokens, other.tokens, other.logprobs)
        left = next((both for a, b, both in places if a != b), None)
        if left is not None:
            best, second, *_ = sorted((value for value, _ in left.values()), reverse=True)
            gaps.append(best - second)
    assert ours.speculator.counters.as_dict()["accepted_nodes_1"] > 100
    # Of a chain and a tree most answers are the same ones to the end.
    assert len(gaps) <= len(PROMPTS) // 2 and all(gap < 0.1 for gap in gaps), gaps
