"""A drafter left out of steps: no token changes, and it drafts as one that never was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.committed import rows_of
from support.engines import DRAFTER, make_engine, note_calls
from support.lone_drafters import MAX_LEN, PAGE, head_of
from support.matrix import Checker, every_case, params
from support.trees import texts
from vllm.platforms import current_platform

from vllm_specblock.config import CombineConfig, OptionError
from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.drafters.options import NGramConfig, SpecBlockConfig
from vllm_specblock.engine.config import vllm_args
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters

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


def steps_of_one_text(first: int):
    """Rows of a prompt, then of single tokens."""
    ends = [first, *range(first + 1, first + 9)]
    return list(zip([0, *ends], ends))


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False], ids=["prompt read", "prompt kept for later"])
def test_it_drafts_what_one_drafts_that_was_never_left_out(first):
    """Both before the same text; one took in all rows at once, the other step by step."""
    always, width = head_of("specblock")
    sometimes, _ = head_of("specblock")
    lookup = NGramDrafter(NGramConfig(), NODES, MAX_LEN)
    options = CombineConfig(draft_policy="merge", skip_drafter=True)
    turns = iter([first, False, False, True, False, True, False, False, True])
    controller = SimpleNamespace(asks=lambda *_: next(turns))
    merged = SkippingMergedDrafters(
        [sometimes, lookup], options, NODES, 4, torch.device("cpu"), controller
    )
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, MAX_LEN, width, generator=draw)
    text = torch.randint(0, 500, (1, MAX_LEN + 1), generator=draw)
    table, asked = torch.arange(1, 17)[None], 0
    drafted, draft = [], sometimes.draft
    sometimes.draft = lambda: drafted.append(draft()) or drafted[-1]
    for begin, end in steps_of_one_text(20):
        rows = rows_of([(begin, end)], table, states, text, PAGE)
        always.advance(rows)
        merged.advance(rows)
        drafted.clear()
        proposal = merged.combine(rows)
        assert len(drafted) == merged.asked
        assert (proposal.drafted[0] > 0).all() == merged.asked
        if merged.asked:
            asked += 1
            found, wanted = texts(drafted[0], 0), texts(always.draft(), 0)
            common = found.keys() & wanted.keys()
            assert len(common) >= len(wanted) - 2, "more than a tie at the budget's cut differs"
            for path in common:
                assert found[path] == pytest.approx(wanted[path], abs=1e-3)
    assert asked == 3 + first and merged.behind.bytes == 0


def a_plan(**changes) -> ResolvedConfig:
    heads = (
        ResolvedDrafter(kind="specblock", folder=str(DRAFTER), options=SpecBlockConfig()),
        ResolvedDrafter(kind="ngram", folder=None, options=NGramConfig()),
    )
    return ResolvedConfig(
        drafters=heads, combine=CombineConfig(**{"draft_policy": "merge", **changes})
    )


def test_where_a_drafter_is_left_out():
    one, two = (SimpleNamespace(tensor_parallel_size=size) for size in (1, 2))

    def skips(plan, parallel=one):
        return vllm_args._with_skipping(plan, parallel).combine.skip_drafter

    assert skips(a_plan()) is True and skips(a_plan(skip_drafter=False)) is False
    assert not skips(a_plan(), two)
    assert not skips(a_plan(draft_policy="route")) and not skips(a_plan(budget="split"))
    for changes, parallel in (
        ({"budget": "split"}, one),
        ({}, two),
        ({"draft_policy": "route"}, one),
    ):
        with pytest.raises(OptionError, match=r"'skip_drafter' is true, but .*: drop the key\.$"):
            skips(a_plan(skip_drafter=True, **changes), parallel)
    two_drafters = a_plan().model_copy(update={"drafters": a_plan().drafters[:1] * 2})
    assert not skips(two_drafters)
