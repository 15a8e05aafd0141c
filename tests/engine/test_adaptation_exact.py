"""Swapping a drafter's weights at any time: the tokens are vLLM's own.

What changes when: `lib.weight_swaps`. `benchmarks/exactness.py --swaps` compares more tokens.
"""

from __future__ import annotations

import pytest
import torch
from lib.weight_swaps import Swaps, Versions, make_versions
from support.engines import DRAFTER, ROOT, Engine, make_engine, note_calls, record_preemptions
from support.matrix import CASES, PROMPTS, Checker, crowded_engine, params, to_the_limit
from support.recorded_graph import capture
from vllm.platforms import current_platform

from vllm_specblock.drafters.specblock.refresh import refresh

TABLES = ROOT / "examples/two_heads/tables"
NAMES = ["greedy", "sampled log-probabilities", "presence penalty, sampled"]
check = Checker()


@pytest.fixture(scope="module")
def versions() -> Versions:
    return make_versions(DRAFTER, TABLES)


def swapping(engine: Engine, versions: Versions, monkeypatch, heads=(0,), seed=0) -> Swaps:
    swaps = Swaps(engine.speculator, versions, heads, seed)
    monkeypatch.setattr(engine.speculator, "propose", swaps.around(engine.speculator.propose))
    return swaps


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine({"num_speculative_tokens": 24})


def compare(engine: Engine, reference, name: str) -> None:
    requests, texts = params(8, max_tokens=90, **CASES[name]), PROMPTS[:8]
    check(engine, requests, reference(f"{name}, 90", requests, texts), texts)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_parameters(engine, versions, reference, monkeypatch, name):
    swaps = swapping(engine, versions, monkeypatch, seed=NAMES.index(name))
    compare(engine, reference, name)
    swaps.require(100, accepted=20)


def test_prefix_cache_hits(engine, plain, versions, monkeypatch):
    """Keys and values that the hits bring are of weights that are gone."""
    texts = [PROMPTS[9], PROMPTS[7], PROMPTS[9][:160], PROMPTS[9] + PROMPTS[2]]
    requests = params(len(texts))
    expected = plain.generate(texts, requests)
    swaps = swapping(engine, versions, monkeypatch)
    for _ in range(2):
        check(engine, requests, expected, texts)
    swaps.require(100, accepted=20)


def test_crowded_and_adaptive(versions, reference, monkeypatch):
    """Both of two drafters change; chunked prompts, preemption, budgets and the length limit."""
    speculative = {"second_drafter": {"model": str(TABLES)}, "draft_policy": "merge"}
    speculative |= {"num_speculative_tokens": 10, "enable_adaptive_verification": True}
    crowded = crowded_engine(speculative)
    if current_platform.is_cpu():
        # Drafts this poor are soon not worth their time.
        manager = crowded.runner.adaptive_verification
        monkeypatch.setattr(manager.controller, "drafts", lambda *_: True)
    preempted = record_preemptions(crowded)
    swaps = swapping(crowded, versions, monkeypatch, heads=(0, 1))
    for temperature in (0.0, 1.0):
        requests, texts = to_the_limit(temperature)[:8], PROMPTS[:8]
        check(crowded, requests, reference(f"crowded {temperature}", requests, texts), texts)
    assert preempted, "the cache was large enough for every request: this tested no preemption"
    swaps.require(200, accepted=40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recording knows no compiled kernels")
def test_a_graph_drafts_by_the_new_weights(engine, versions, reference, monkeypatch):
    """A graph reads addresses: its drafts are those of eager steps under the same swaps."""
    speculator, requests = engine.speculator, params(3, max_tokens=40)
    monkeypatch.setattr(speculator, "pad_rows", True)
    expected = reference("three for a graph", requests, PROMPTS[:3])

    def drafts() -> list[list]:
        engine.llm.reset_prefix_cache()
        speculator.forget_warm_up()
        refresh(speculator.draft_policy.drafters[0].model, versions["trained"])
        with monkeypatch.context() as patch:
            found = note_calls(patch, speculator, "propose", lambda of, *_, **__: of.tolist())
            swapping(engine, versions, patch)
            check(engine, requests, expected, PROMPTS[:3])
        return found

    eager = drafts()
    graphs = capture(engine, monkeypatch, [25 * count for count in (1, 3)])
    assert drafts() == eager
    replays = sum(graph.replays for graph in graphs.values())
    assert replays > 0.7 * len(eager)
