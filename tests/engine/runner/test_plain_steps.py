"""A step without drafts runs as in an engine without us: the same calls, and few beyond them."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from support.engines import Engine, make_engine, prompts
from vllm import SamplingParams

if torch.cuda.is_available():
    pytest.skip("counts calls of vLLM's CPU backend", allow_module_level=True)

STEPS = 8
OF_VLLM = {
    "CPUAttentionMetadataBuilder.build": 1,
    "CPUAttentionBackendImpl.forward": 7,
    "CPUAttentionBackendImpl.do_kv_cache_update": 7,
    "Sampler.__call__": 1,
}


@pytest.fixture(scope="module")
def ours() -> Engine:
    ngram = {"kind": "ngram", "model": None, "num_speculative_tokens": 8}
    return make_engine(ngram | {"enable_adaptive_verification": True})


def calls_of_a_step(engine: Engine, requests: int, **params) -> Counter[str]:
    """Python calls of one decode step, the mean of a few, by qualified name."""
    core = engine.llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **params)
    for number, prompt in enumerate(prompts(requests)):
        core.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    for _ in range(6):  # prompts, and the last drafts before a pause
        core.step()
    calls: Counter[str] = Counter()

    def count(frame, event, _):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            core.step()
    finally:
        sys.setprofile(None)
    while core.has_unfinished_requests():
        core.step()
    return Counter({name: count / STEPS for name, count in calls.items()})


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("why", ["paused", "declined"])
def test_a_step_without_drafts_is_vllms(plain, ours, monkeypatch, requests, why):
    declined = {"extra_args": {"specblock_draft": 0}} if why == "declined" else {}
    if why == "paused":  # for good
        state, paused = ours.speculator.adaptive, property(lambda _: True, lambda *_: None)
        kind = type("Paused", (type(state),), {"all_paused": paused})
        monkeypatch.setattr(state, "__class__", kind)
        monkeypatch.setattr(state, "decide", lambda batch: None)
    mine = calls_of_a_step(ours, requests, **declined)
    theirs = calls_of_a_step(plain, requests)
    if ours.runner.model.model.layers[0].self_attn.attn.impl.packed is None:
        pytest.skip("vLLM packs the caches of this CPU in another way")
    assert {name: mine[name] for name in OF_VLLM} == OF_VLLM
    assert mine.total() - theirs.total() <= 45 + 9 * requests
