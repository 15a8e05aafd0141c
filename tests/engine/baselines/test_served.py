"""Drafters of other papers in vLLM: its own tokens, and what was learned drafted as trees."""

from __future__ import annotations

import pytest
from support.engines import DRAFTER, assert_identical, make_engine
from support.learned import write_learned, write_peagle
from support.matrix import PROMPTS, half_sampled, params

ASKED, NEW_TOKENS = PROMPTS[:4], 40
SECOND = {"model": str(DRAFTER)}


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("falcon", {"second_drafter": SECOND, "draft_policy": "merge"}),
        ("dflash", {"second_drafter": SECOND, "draft_policy": "merge"}),
        ("jetspec", {}),
        ("dspark", {"second_drafter": {"model": "P-EAGLE"}, "draft_policy": "merge"}),
    ],
    ids=["Falcon, merged", "DFlash, merged", "JetSpec", "DSpark and P-EAGLE, merged"],
)
def test_tokens_are_vllms_own_and_drafts_are_accepted(
    kind, beside, tmp_path, reference, monkeypatch
):
    greedy = reference("baselines", params(len(ASKED), max_tokens=NEW_TOKENS), ASKED)
    write_learned(tmp_path, kind, ASKED, [one.tokens for (one,) in greedy])
    if kind == "dspark":
        beside["second_drafter"]["model"] = str(write_peagle(tmp_path / "second"))
    engine = make_engine({"model": str(tmp_path), "num_speculative_tokens": 12, **beside})
    for pad in sorted({engine.speculator.pad_rows, True}):  # on a CPU, also as on a GPU
        monkeypatch.setattr(engine.speculator, "pad_rows", pad)
        requests = half_sampled(len(ASKED), max_tokens=NEW_TOKENS)
        found = engine.generate(ASKED, requests)
        assert_identical(found, reference("baselines, half hot", requests, ASKED))
    count = engine.speculator.counters.as_dict()
    assert count["accepted_nodes", 1] > 40, count
