"""Swapping a drafter's weights at any time: the tokens are vLLM's own.

What changes when: `lib.weight_swaps`. `benchmarks/exactness.py --swaps` compares more tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lib.weight_swaps import NAN, Swaps, Versions, make_versions
from support.engines import DRAFTER, ROOT, Engine, make_engine, record_preemptions
from support.matrix import CASES, PROMPTS, Checker, crowded_engine, params, to_the_limit
from support.recorded_graph import capture
from vllm.platforms import current_platform

from vllm_specblock.adapt.link.staged import StagedVersion
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.serving import swaps as serving_swaps
from vllm_specblock.adapt.serving.refresh import Refresh
from vllm_specblock.drafters.specblock.refresh import HEADS

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


def test_crowded(versions, reference, monkeypatch):
    """Chunked prompts, preemption and the length limit at once."""
    crowded = crowded_engine({"num_speculative_tokens": 10})
    preempted = record_preemptions(crowded)
    swaps = swapping(crowded, versions, monkeypatch)
    for temperature in (0.0, 1.0):
        requests, texts = to_the_limit(temperature)[:8], PROMPTS[:8]
        check(crowded, requests, reference(f"crowded {temperature}", requests, texts), texts)
    assert preempted, "the cache was large enough for everybody: this tested no preemption"
    swaps.require(200, accepted=20)


COMBINATIONS = {
    "merge": ({"second_drafter": {"model": str(TABLES)}, "draft_policy": "merge"}, (0, 1)),
    "adaptive verification": ({"enable_adaptive_verification": True}, (0,)),
}


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_combinations(versions, reference, monkeypatch, combination):
    speculative, heads = COMBINATIONS[combination]
    combined = make_engine({"num_speculative_tokens": 10, **speculative})
    if combination == "adaptive verification" and current_platform.is_cpu():
        # Drafts this poor are soon not worth their time.
        manager = combined.runner.adaptive_verification
        monkeypatch.setattr(manager.controller, "drafts", lambda *_: True)
    swaps = swapping(combined, versions, monkeypatch, heads)
    for name in ("greedy", "temperature 1"):
        compare(combined, reference, name)
    swaps.require(200, accepted=40)


class Offers:
    """A link whose trainer always has another version; it counts what became of them."""

    def __init__(self, versions: Versions):
        self.versions, self.draw, self.number = versions, random.Random(0), 0
        self.taken, self.refused = Counter(), Counter()

    def staged(self) -> StagedVersion:
        self.number += 1
        name = self.draw.choice(sorted(self.versions))
        self.offered, tensors = name, self.versions[name]
        action = Action.HEADS if all(key.startswith(HEADS) for key in tensors) else Action.FULL
        return StagedVersion(self.number, 0, action, tensors)

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        assert version.number == self.number and seconds > 0
        self.taken[self.offered] += 1

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        self.refused[self.offered] += 1


@pytest.mark.parametrize("name", ["greedy", "temperature 1"])
def test_versions_that_arrive_over_several_steps(engine, versions, reference, monkeypatch, name):
    """As on a GPU, where a version is prepared in a thread."""
    offers, propose = Offers(versions), engine.speculator.propose
    refresh = Refresh(engine.speculator.draft_policy.drafters[0].model)
    coming = serving_swaps.Swaps(offers, refresh)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        refresh._pool = ThreadPoolExecutor(1)

    def turning(*args, **kwargs):
        coming.turn()
        return propose(*args, **kwargs)

    monkeypatch.setattr(engine.speculator, "propose", turning)
    for _ in range(2):
        compare(engine, reference, name)
    assert offers.taken.total() > 10, offers.taken
    assert set(offers.refused) == {NAN}, offers.refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recording knows no compiled kernels")
def test_a_graph_drafts_by_the_new_weights(versions, reference, monkeypatch):
    """A graph reads addresses: its drafts are those of eager steps under the same swaps."""
    graphed = make_engine({"num_speculative_tokens": 10})
    speculator, requests = graphed.speculator, params(3, max_tokens=40)
    monkeypatch.setattr(speculator, "pad_rows", True)
    expected = reference("three for a graph", requests, PROMPTS[:3])

    def drafts() -> list[list]:
        graphed.llm.reset_prefix_cache()
        speculator.forget_warm_up()
        speculator.draft_policy.drafters[0].refresh(versions["trained"])
        found = []
        with monkeypatch.context() as patch:
            propose = speculator.propose

            def noting(*args, **kwargs):
                found.append(propose(*args, **kwargs).tolist())
                return torch.tensor(found[-1])

            patch.setattr(speculator, "propose", noting)
            swapping(graphed, versions, patch)
            check(graphed, requests, expected, PROMPTS[:3])
        return found

    eager = drafts()
    graphs = capture(graphed, monkeypatch, [11 * count for count in (1, 3)])
    assert drafts() == eager
    replays = sum(graph.replays for graph in graphs.values())
    assert replays > 0.7 * len(eager)
