"""What we do for releases that are not the installed one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm
from packaging.version import Version
from support.engines import assert_identical, make_engine, note_calls, prompts
from vllm import SamplingParams

from vllm_specblock.cpu import install

SIZE = 16


def tables(**beyond) -> SimpleNamespace:
    """Two groups of caches of six request slots, ten blocks each."""
    blocks = torch.arange(1, 121, dtype=torch.int32).view(2, 6, 10)
    return SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=group) for group in blocks],
        input_block_tables=[torch.full((6, 10), 7, dtype=torch.int32) for _ in blocks],
        block_sizes=[SIZE, SIZE],
        **beyond,
    )


def test_blocks_that_a_window_has_passed_are_taken_out():
    slots, computed = torch.tensor([4, 1]), torch.tensor([0, 100, 0, 0, 31, 0])
    given = tables(_sliding_window_reach=[0, 40], _num_dirty_rows=0)
    whole, window = install._gather_block_tables(given, slots, 3, num_computed_tokens=computed)
    for group, found in enumerate((whole, window)):
        for row, slot in enumerate(slots.tolist()):
            expected = given.block_tables[group].gpu[slot].clone()
            if group == 1:
                for block in range(10):
                    # No entry of it lies within reach of the first token that is computed.
                    if (block + 1) * SIZE <= computed[slot] - 40:
                        expected[block] = 0
            assert torch.equal(found[row], expected)
        assert not found[2].any()
    assert (window[1] == 0).sum() == 3 and (window[0] == 0).sum() == 0
    (_, without) = install._gather_block_tables(given, slots, 3)
    assert torch.equal(without[:2], given.block_tables[1].gpu[slots])


@pytest.mark.parametrize("beyond", [{}, {"_sliding_window_reach": [0, 0], "_num_dirty_rows": 0}])
def test_rows_of_a_larger_batch_are_cleared(beyond):
    given = tables(**beyond)
    install._gather_block_tables(given, torch.tensor([0, 1, 2, 3]), 4)
    install._gather_block_tables(given, torch.tensor([5]), 1)
    assert given._num_dirty_rows == 1
    for table in given.input_block_tables:
        assert table[0].all() and not table[1:4].any() and (table[4:] == 7).all()


def test_no_drafts_where_no_request_could_use_them(plain, monkeypatch):
    """From 0.33 on chunks of prompts propose none; the drafters have to follow all the same."""
    engine = make_engine({"num_speculative_tokens": 24}, max_num_batched_tokens=64)
    propose, skipped = engine.speculator.propose, []

    def skipping(batch, *args, **kwargs):
        done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens[: batch.num_reqs]
        if (done < batch.prefill_len_np).all():
            kwargs["num_speculative_tokens"] = 0
            skipped.append(batch.num_reqs)
        tokens = propose(batch, *args, **kwargs)
        if kwargs.get("num_speculative_tokens") == 0:
            tokens[:] = -1  # as vLLM does in place
        return tokens

    monkeypatch.setattr(engine.speculator, "propose", skipping)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    texts = [text for text in prompts(12) if len(text) > 100]  # several chunks each
    # One after the other: in a larger batch some request could nearly always draft.
    answers = [engine.generate([text], params)[0] for text in texts]
    assert assert_identical(answers, plain.generate(texts, params)) > 60 and len(skipped) > 2
    assert (engine.speculator.draft_tokens >= 0).all(), "marks of vLLM's are no tokens"
    accepted = int(engine.speculator.counters.total.sum())  # of all that is counted
    assert accepted > 0


@pytest.mark.skipif(Version(vllm.__version__) < Version("0.33"), reason="vLLM from 0.33 on")
def test_the_scheduler_says_when_no_request_could_use_them(plain, monkeypatch):
    """As vLLM does it itself from 0.33 on: in chunks of a prompt, and in the last step."""
    engine = make_engine({"num_speculative_tokens": 24}, max_num_batched_tokens=64)
    assert engine.core.scheduler.can_skip_drafts
    wanted = note_calls(
        monkeypatch,
        engine.speculator,
        "propose",
        lambda *_, num_speculative_tokens, **__: num_speculative_tokens,
    )
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    (text,) = [text for text in prompts(12) if len(text) == 200]
    answers = engine.generate([text], params)
    assert wanted[:3] == [0, 0, 0] and wanted[3] == 24, "of 200 tokens 64 at a time, the last draws"
    assert_identical(answers, plain.generate([text], params))
    one = SamplingParams(temperature=0, max_tokens=1)
    del wanted[:]
    engine.generate([text[:20]], one)
    assert wanted == [0]
