"""All drafters and combinations: the tokens are vLLM's own.

Every combination runs the whole matrix of sampling parameters, three times over the same prompts,
which hit the prefix cache. Crowded engines: adaptive/test_trees.py and test_adaptation_exact.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines import DRAFTER, EAGLE3, ROOT, Engine, shared_engine
from support.matrix import Checker, every_case

NGRAM = {"kind": "ngram"}
ONLY_NGRAM = {"kind": "ngram", "model": None}

COMBINATIONS = {
    "EAGLE-3": EAGLE3,
    "n-gram": ONLY_NGRAM,
    "two SpecBlocks, route": {"second_drafter": {"model": str(ROOT / "examples/two_heads/tables")}},
    "SpecBlock and EAGLE-3, trie": {"second_drafter": EAGLE3, "draft_policy": "merge"},
    "SpecBlock and EAGLE-3, disjoint, split": {
        "second_drafter": EAGLE3,
        "draft_policy": "merge",
        "merge": "disjoint",
        "budget": "split",
    },
    "n-gram and SpecBlock, trie": {
        **ONLY_NGRAM,
        "second_drafter": {"model": str(DRAFTER)},
        "draft_policy": "merge",
    },
    "EAGLE-3 and n-gram, route": {**EAGLE3, "second_drafter": NGRAM, "confidence": "sum"},
}


@pytest.fixture(scope="module", params=COMBINATIONS)
def engine(request) -> Engine:
    # Small trees: sampling at every node is what takes the time on a CPU.
    return shared_engine({"num_speculative_tokens": 10, **COMBINATIONS[request.param]})


def test_matrix(engine, reference, request):
    check, (texts, requests) = Checker(), every_case()
    check(engine, requests, reference("every case", requests, texts), texts)
    assert check.tokens >= 2_500
    counts = engine.speculator.counters.as_dict()
    if "draft_policy" in COMBINATIONS[request.node.callspec.params["engine"]]:
        assert counts["accepted_nodes", 1] and counts["accepted_nodes", 2], "a drafter's are wrong"


def test_twins_draw_the_same_by_any_sampler(engine, request):
    """FlashInfer's draws for every row apart: each of two equal texts would try its luck."""
    for processors in (4, 3):  # vLLM has three of its own
        sampler = SimpleNamespace(logits_processors=[None] * processors, use_flashinfer=True)
        engine.runner.model_state.custom_sampler(sampler)
        disjoint = "disjoint" in request.node.callspec.params["engine"]
        assert sampler.use_flashinfer == (not disjoint)
        assert engine.speculator.all_chains == (processors > 3), "a user's may look back"
