"""Dummy batches: the drafters run on them, and no request's state changes."""

from __future__ import annotations

import pytest
import torch
from support.engines import KINDS, note_calls, shared_engine
from support.matrix import PROMPTS, params


@pytest.fixture
def engine():
    return shared_engine({"num_speculative_tokens": 10, **KINDS["route"]})


def answers(engine) -> list[list[int]]:
    return [each[0].tokens for each in engine.generate(PROMPTS[:4], params(4, max_tokens=20))]


def state(engine) -> list[torch.Tensor]:
    """What of the engine's requests must stay: their slots, the counts, all blocks but the null."""
    speculator = engine.speculator
    slots = speculator.tree_states
    kept = [slots.parent, slots.depth, slots.ancestors, slots.accepted, slots.origin]
    kept = [each[: speculator.scratch_idx] for each in kept] + [speculator.counters.total]
    context = speculator.vllm_config.compilation_config.static_forward_context
    heads = (name for names in speculator.caches.drafter_layers for name in names)
    names = [*speculator.caches.target_layers, *heads]
    return [each.clone() for each in (*kept, *(context[name].kv_cache[1:] for name in names))]


def advances(engine, monkeypatch) -> list[int]:
    """Rows of every call of the first head's `advance` from now on."""
    head = engine.speculator.draft_policy.drafters[0]
    return note_calls(monkeypatch, head, "advance", lambda _, rows: len(rows.token))


@pytest.mark.parametrize(
    "dummy",
    [{"num_tokens": 40}, {"num_tokens": 33, "uniform_decode": True}],
    ids=["prompts", "decode"],
)
# Without padding, rows follow from verdicts, which are read on the host: a CPU's way.
@pytest.mark.parametrize("pad", [True] if torch.cuda.is_available() else [False, True])
def test_a_dummy_run_changes_nothing(engine, monkeypatch, dummy, pad):
    wanted = answers(engine)
    before = state(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.speculator, "pad_rows", pad)
        rows = advances(engine, patch)
        engine.runner._dummy_run(**dummy)
        assert len(rows) == 1 and rows[0] >= dummy["num_tokens"]
    for now, then in zip(state(engine), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert answers(engine) == wanted


def test_the_memory_profile_runs_the_heads(engine, monkeypatch):
    """Before there are caches, on as many rows as a step can have. One request that is longer than
    the model allows: `profiled` in tests/emulated_gpu."""
    speculator, runner, tokens = engine.speculator, engine.runner, engine.runner.max_num_tokens
    rows = advances(engine, monkeypatch)
    bound = [head.attention_builder for head in speculator.draft_policy.drafters]
    runner._dummy_run(tokens, skip_attn=True, is_profile=True)
    assert rows == [tokens]
    for head, builder in zip(speculator.draft_policy.drafters, bound):
        assert head.attention_builder.caches[0].shape[0] == 1  # no cache of vLLM's was touched
        head.attention_builder = builder
