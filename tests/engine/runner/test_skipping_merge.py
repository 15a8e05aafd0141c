"""A drafter left out of steps: no token changes, and repeated text is looked up instead."""

from __future__ import annotations

import pytest
from support.engines import make_engine, note_calls
from support.matrix import Checker, every_case, params
from vllm.platforms import current_platform

from vllm_specblock.engine.runner.draft_policy import SkippingMergedDrafters

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="for a host's memory")
NODES = 24
MERGED = {
    "num_speculative_tokens": NODES,
    "draft_policy": "merge",
    "second_drafter": {"kind": "ngram"},
}


@pytest.fixture(scope="module")
def engine():
    return make_engine({**MERGED, "enable_adaptive_verification": True})


def every_third(engine, monkeypatch) -> list[bool]:
    """The drafter is asked in one step of three; what was decided."""
    found: list[bool] = []
    controller = engine.runner.adaptive_verification.controller
    monkeypatch.setattr(
        controller, "asks", lambda *_: found.append(len(found) % 3 == 2) or found[-1]
    )
    monkeypatch.setattr(controller, "drafts", lambda *_: True)
    return found


def test_no_token_changes(engine, reference, monkeypatch):
    asked = every_third(engine, monkeypatch)
    texts, requests = every_case()
    Checker()(engine, requests, reference("every case", requests, texts), texts)
    assert {False, True} <= set(asked)


def test_by_itself_it_leaves_the_drafter_out_where_text_repeats(engine, monkeypatch):
    monkeypatch.setattr(engine.runner.adaptive_verification.controller, "drafts", lambda *_: True)
    draft_policy = engine.speculator.draft_policy
    assert isinstance(draft_policy, SkippingMergedDrafters) and draft_policy.lookup == 1
    draft_policy.forget()
    decided = note_calls(monkeypatch, draft_policy, "advance", lambda *_: draft_policy.asked)
    engine.generate([[100, 200, 300, 400] * 12], params(1, temperature=0.0, max_tokens=40))
    assert not all(decided)
