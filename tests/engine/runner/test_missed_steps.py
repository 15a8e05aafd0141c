"""Steps without a drafter, paused or skipped: no token changes, and later hits see only rows that
were written."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from support.engines import Engine, note_calls, record_drafts, shared_engine
from support.matrix import Checker, every_case, params
from vllm.platforms import current_platform

from vllm_specblock.drafters.common.missed_rows import Backlog
from vllm_specblock.engine.runner.draft_policy import SkippingMergedDrafters

BLOCK, NEW = 32, 40
draw = random.Random(11)
PROMPT = [draw.randrange(3, 2048) for _ in range(4 * BLOCK + 5)]
ADAPTIVE = {
    "num_speculative_tokens": 24,
    "calibrate_drafts": False,
    "enable_adaptive_verification": True,
}
MERGED = ADAPTIVE | {"draft_policy": "merge", "second_drafter": {"kind": "ngram"}}
on_the_host = pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU skips no drafter")


def pause_by_hand(engine: Engine, monkeypatch) -> SimpleNamespace:
    """Drafting is paused while `pause.on`; otherwise whole trees are drafted and verified."""
    manager, pause = engine.runner.adaptive_verification, SimpleNamespace(on=False)
    monkeypatch.setattr(manager, "is_paused", lambda batch: pause.on)
    monkeypatch.setattr(manager.controller, "drafts", lambda *_: not pause.on)
    monkeypatch.setattr(manager.controller, "brief", lambda *_: False)
    monkeypatch.setattr(manager.controller, "budget", lambda *_: 1)
    choose = manager.get_num_tokens

    def get_num_tokens(*args) -> int:
        choose(*args)
        drafts, others, budget = manager._batch_budget
        budget = 0 if pause.on else sum(drafts.values())
        manager._batch_budget = drafts, others, budget
        return sum(others.values()) + budget

    monkeypatch.setattr(manager, "get_num_tokens", get_num_tokens)
    manager.all_paused = False
    return pause


@pytest.fixture(params=["backlog", "no backlog", "padded, no backlog"])
def engine(request, monkeypatch) -> tuple[Engine, SimpleNamespace]:
    """As on a CPU; without its memory of missed rows; and in the shapes of a GPU's steps."""
    engine = shared_engine(ADAPTIVE)
    speculator = engine.speculator
    if request.param != "backlog":
        monkeypatch.setattr(speculator.skipped, "backlog", Backlog(0))
    if request.param.startswith("padded"):
        monkeypatch.setattr(speculator, "pad_rows", True)
    fresh(engine, 0.0)
    return engine, pause_by_hand(engine, monkeypatch)


def fresh(engine: Engine, garbage: float) -> None:
    """Empty caches: the drafter's hold `garbage`."""
    assert engine.llm.reset_prefix_cache()
    speculator = engine.speculator
    speculator.skipped.masks.zero_()
    # In place: graphs keep the addresses of what they read.
    holes = speculator.skipped.holes
    holes.missing.fill_(holes.block_size)
    holes.seen.zero_()
    holes.skips = 0
    context = engine.core.vllm_config.compilation_config.static_forward_context
    for names in speculator.caches.drafter_layers:
        for name in names:
            context[name].kv_cache.fill_(garbage)
    assert not holes.any


def answer(engine: Engine, text: list[int], count: int = NEW) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt's were cached."""
    (request,) = params(1, max_tokens=count)
    (found,) = engine.llm.generate([{"prompt_token_ids": text}], request, use_tqdm=False)
    return list(found.outputs[0].token_ids), found.num_cached_tokens


def drafts_of(engine: Engine, monkeypatch, text: list[int]):
    with monkeypatch.context() as patching:
        drafts = record_drafts(engine, patching)
        return answer(engine, text), drafts


def blocks(engine: Engine) -> torch.Tensor:
    """The last request's blocks; requests that come alone have the last slot."""
    speculator = engine.speculator
    return speculator.block_tables.block_tables[speculator.caches.group].gpu[-1].long()


def test_a_prompt_read_during_a_pause(engine, monkeypatch):
    """A hit on its blocks drafts as a hit on blocks that were masked, with any contents."""
    engine, pause = engine
    text, found = [*PROMPT, 5, 6, 7], []
    for garbage in (0.0, 1e6):
        fresh(engine, garbage)
        pause.on = True
        tokens, _ = answer(engine, PROMPT, 4)
        pause.on = False
        answer(engine, [5, 6], 2)  # the scheduler gives the first step no drafts
        assert engine.speculator.skipped.holes.any
        found.append(drafts_of(engine, monkeypatch, text))
    fresh(engine, 0.0)
    assert answer(engine, PROMPT, 4)[0] == tokens
    assert not engine.speculator.skipped.holes.any
    engine.speculator.skipped.holes.skip(blocks(engine)[:4] * BLOCK)
    reference = drafts_of(engine, monkeypatch, text)
    assert found == [reference, reference] and reference[0][1] == 3 * BLOCK
    fresh(engine, 0.0)
    answer(engine, PROMPT, 4)
    whole = drafts_of(engine, monkeypatch, text)
    assert whole[0] == reference[0], "tokens are exact"
    assert whole[1] != reference[1], "the masked blocks matter"


def test_a_request_that_lives_through_a_pause(engine, monkeypatch):
    """It drafts again, and so do later requests from what it wrote before and after the pause."""
    engine, pause = engine
    speculator, missed = engine.speculator, range(45, 75)
    fresh(engine, 1e6)
    sizes, propose = [], speculator.propose

    def noting(batch, *args, **kwargs):
        position = int(batch.positions[0])
        pause.on = missed.start <= position < missed.stop
        tokens = propose(batch, *args, **kwargs)
        blind = bool(speculator.skipped.blind[batch.idx_mapping].any())
        assert not blind or (speculator.tree_states.parent[batch.idx_mapping] < 0).all()
        sizes.append((position, not pause.on and not blind))
        return tokens

    with monkeypatch.context() as patching:
        patching.setattr(speculator, "propose", noting)
        tokens, _ = answer(engine, PROMPT[:40], 100)
    undrafted = [position for position, drafted in sizes if not drafted]
    first = next(position for position, drafted in sizes if drafted and position > missed.stop - 1)
    if not speculator.skipped.backlog.most_bytes:
        assert 3 * BLOCK <= first < 3 * BLOCK + 3
        complete = [BLOCK, min(undrafted) % BLOCK, 0, BLOCK]
        assert speculator.skipped.holes.missing[blocks(engine)[:4]].tolist() == complete
    else:
        assert first < missed.stop + 10 and not speculator.skipped.holes.any
    text = [*PROMPT[:40], *tokens, 5, 6]
    (hit, cached), drafts = drafts_of(engine, monkeypatch, text)
    assert cached == 3 * BLOCK
    fresh(engine, 0.0)
    assert answer(engine, PROMPT[:40], 100)[0] == tokens
    if not speculator.skipped.backlog.most_bytes:
        speculator.skipped.holes.skip(blocks(engine)[1:3] * BLOCK)
    assert drafts_of(engine, monkeypatch, text) == ((hit, cached), drafts)


@pytest.fixture
def skipping(monkeypatch) -> Engine:
    """A drafter beside a lookup, which is confident where text repeats."""
    engine = shared_engine(MERGED)
    assert isinstance(engine.speculator.draft_policy, SkippingMergedDrafters)
    return engine


def asks(engine: Engine, monkeypatch, when) -> None:
    """Ask the drafter in the steps for which `when` is true."""
    monkeypatch.setattr(engine.speculator.draft_policy.controller, "asks", lambda *_: when())


@on_the_host
def test_a_drafter_skipped_beside_a_lookup(skipping, monkeypatch):
    """Its missed rows are kept for the request itself; other requests do not see them."""
    pause_by_hand(skipping, monkeypatch)
    skipped, asked, found = skipping.speculator.skipped, SimpleNamespace(on=False), []
    asks(skipping, monkeypatch, lambda: asked.on)
    text, alone = [*PROMPT, 5, 6, 7], []
    for garbage, asked.on in ((0.0, False), (1e6, False), (0.0, True)):
        fresh(skipping, garbage)
        alone.append(answer(skipping, PROMPT, 40)[0])
        if asked.on:
            skipped.holes.skip(blocks(skipping)[:4] * BLOCK)
        assert skipped.holes.any
        asked.on = True
        found.append(drafts_of(skipping, monkeypatch, text))
    assert found[0] == found[1] == found[2] and alone[0] == alone[2]
    # Asked in the end, the drafter reads what it missed.
    fresh(skipping, 1e6)
    steps = iter(range(10**6))
    asks(skipping, monkeypatch, lambda: next(steps) > 3)
    answer(skipping, PROMPT, 60)
    assert not skipped.holes.any and skipped.backlog.bytes == 0
    asks(skipping, monkeypatch, lambda: True)
    (hit, cached), drafts = drafts_of(skipping, monkeypatch, text)
    fresh(skipping, 0.0)
    answer(skipping, PROMPT, 60)
    assert drafts_of(skipping, monkeypatch, text) == ((hit, cached), drafts)


@on_the_host
def test_every_sampling_case_where_a_drafter_is_asked_in_one_step_of_three(
    skipping, reference, monkeypatch
):
    pause_by_hand(skipping, monkeypatch)
    asked: list[bool] = []
    asks(skipping, monkeypatch, lambda: asked.append(len(asked) % 3 == 2) or asked[-1])
    texts, requests = every_case(1)
    Checker()(skipping, requests, reference("every case once", requests, texts), texts)
    assert {False, True} <= set(asked)


@on_the_host
def test_by_itself_it_leaves_the_drafter_out_where_text_repeats(skipping, monkeypatch):
    manager, policy = skipping.runner.adaptive_verification, skipping.speculator.draft_policy
    monkeypatch.setattr(manager.controller, "drafts", lambda *_: True)
    decided = note_calls(monkeypatch, policy, "advance", lambda *_: policy.asked)
    skipping.generate([[100, 200, 300, 400] * 12], params(1, temperature=0.0, max_tokens=40))
    assert not all(decided)
