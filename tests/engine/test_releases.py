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

SIZE, REACH = 16, 40


@pytest.mark.parametrize(
    ("window", "beyond"),
    [
        (0, {}),  # up to 0.32
        (0, {"_sliding_window_reach": [0], "_num_dirty_rows": 0}),
        (REACH, {"_sliding_window_reach": [REACH], "_num_dirty_rows": 0}),
    ],
)
def test_block_tables_without_what_a_window_has_passed(window, beyond):
    """Rows of a larger batch before are cleared."""
    blocks = torch.arange(1, 61, dtype=torch.int32).view(6, 10)
    tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=blocks)],
        input_block_tables=[torch.full((6, 10), 7, dtype=torch.int32)],
        block_sizes=[SIZE],
        **beyond,
    )
    computed = torch.tensor([0, 100, 0, 0, 31, 0])
    install._gather_block_tables(tables, torch.tensor([0, 1, 2, 3]), 4)
    slots = torch.tensor([4, 1])
    (found,) = install._gather_block_tables(tables, slots, 2, num_computed_tokens=computed)
    expected = blocks[slots].clone()
    if window:  # token 60 is the first that token 100 sees
        expected[1, :3] = 0
    assert torch.equal(found[:2], expected) and tables._num_dirty_rows == 2
    (table,) = tables.input_block_tables
    assert not table[2:4].any() and (table[4:] == 7).all()


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
