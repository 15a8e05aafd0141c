"""Prompts that are read while drafting is paused: later hits see no row that was not written."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from support.engines import Engine, make_engine, record_drafts
from support.matrix import params
from vllm.platforms import current_platform

BLOCK, NEW = 32, 40
draw = random.Random(11)
PROMPT = [draw.randrange(3, 2048) for _ in range(4 * BLOCK + 5)]


ADAPTIVE = {
    "num_speculative_tokens": 24,
    "calibrate_drafts": False,
    "enable_adaptive_verification": True,
}


def pausing_engine(**speculative) -> tuple[Engine, SimpleNamespace]:
    """Drafting is paused while `pause.on`; otherwise whole trees are drafted and verified."""
    engine, pause = make_engine(ADAPTIVE | speculative), SimpleNamespace(on=False)
    manager = engine.runner.adaptive_verification
    engine.speculator.adaptive.is_paused = lambda batch: pause.on
    manager.controller.drafts = lambda *_: not pause.on
    manager.controller.brief = lambda *_: False
    choose = manager.get_num_tokens

    def get_num_tokens(*args) -> int:
        choose(*args)
        drafts, others, budget = manager._batch_budget
        budget = 0 if pause.on else sum(drafts.values())
        manager._batch_budget = drafts, others, budget
        return sum(others.values()) + budget

    manager.get_num_tokens = get_num_tokens
    return engine, pause


@pytest.fixture(scope="module")
def pausing() -> tuple[Engine, SimpleNamespace]:
    return pausing_engine()


@pytest.fixture(params=["backlog", "no backlog", "padded, no backlog"])
def engine(pausing, request, monkeypatch) -> tuple[Engine, SimpleNamespace]:
    """As on a CPU; without its memory of missed rows; and in the shapes of a GPU's steps."""
    engine, pause = pausing
    speculator = engine.speculator
    if request.param != "backlog":
        monkeypatch.setattr(speculator.skipped, "backlog", None)
        monkeypatch.setattr(speculator.adaptive, "backlog", None)
    if request.param.startswith("padded"):
        monkeypatch.setattr(speculator, "pad_rows", True)
    fresh(engine, 0.0)
    pause.on = False
    return engine, pause


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


def resume(engine: Engine, pause: SimpleNamespace) -> None:
    """End the pause; the scheduler gives the first step no drafts."""
    pause.on = False
    answer(engine, [5, 6], 2)


def test_a_prompt_read_during_a_pause(engine, monkeypatch):
    """A hit on its blocks drafts as a hit on blocks that were masked, with any contents."""
    engine, pause = engine
    text, found = [*PROMPT, 5, 6, 7], []
    for garbage in (0.0, 1e6):
        fresh(engine, garbage)
        pause.on = True
        tokens, _ = answer(engine, PROMPT, 4)
        resume(engine, pause)
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
    sizes, propose, discard = [], speculator.propose, speculator.tree_states.discard

    def noting(batch, *args, **kwargs):
        position = int(batch.positions[0])
        pause.on = missed.start <= position < missed.stop
        sizes.append([position, not pause.on])
        return propose(batch, *args, **kwargs)

    def dropped(req_idx, where):
        sizes[-1][1] &= not bool(where.any())
        discard(req_idx, where)

    with monkeypatch.context() as patching:
        patching.setattr(speculator, "propose", noting)
        patching.setattr(speculator.tree_states, "discard", dropped)
        tokens, _ = answer(engine, PROMPT[:40], 100)
    undrafted = [position for position, drafted in sizes if not drafted]
    first = next(position for position, drafted in sizes if drafted and position > missed.stop - 1)
    if speculator.skipped.backlog is None:
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
    if speculator.skipped.backlog is None:
        speculator.skipped.holes.skip(blocks(engine)[1:3] * BLOCK)
    assert drafts_of(engine, monkeypatch, text) == ((hit, cached), drafts)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU skips no drafter")
def test_a_drafter_skipped_beside_a_lookup(monkeypatch):
    """Its missed rows are kept for the request itself; other requests do not see them."""
    engine, _ = pausing_engine(draft_policy="merge", second_drafter={"kind": "ngram"})
    policy, asked, found = engine.speculator.draft_policy, SimpleNamespace(on=False), []
    policy.controller.asks = lambda *_: asked.on
    text, alone = [*PROMPT, 5, 6, 7], []
    for garbage, asked.on in ((0.0, False), (1e6, False), (0.0, True)):
        fresh(engine, garbage)
        alone.append(answer(engine, PROMPT, 40)[0])
        if asked.on:
            policy.holes.skip(blocks(engine)[:4] * BLOCK)
        assert policy.holes.any
        asked.on = True
        found.append(drafts_of(engine, monkeypatch, text))
    assert found[0] == found[1] == found[2] and alone[0] == alone[2]
    # Asked in the end, the drafter reads what it missed.
    fresh(engine, 1e6)
    steps = iter(range(10**6))
    policy.controller.asks = lambda *_: next(steps) > 3
    answer(engine, PROMPT, 60)
    assert not policy.holes.any and policy.behind.bytes == 0
    policy.controller.asks = lambda *_: True
    (hit, cached), drafts = drafts_of(engine, monkeypatch, text)
    fresh(engine, 0.0)
    answer(engine, PROMPT, 60)
    assert drafts_of(engine, monkeypatch, text) == ((hit, cached), drafts)
