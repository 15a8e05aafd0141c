"""What we do for releases that are not the installed one."""

from __future__ import annotations

import pytest
import vllm
from packaging.version import Version
from support.engines import Engine, assert_identical, note_calls, prompts, shared_engine
from vllm import SamplingParams

CHUNK, NODES = 24, 5


@pytest.fixture
def engine() -> Engine:
    """Prompts come in several chunks, as in test_sessions.py."""
    chunks = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 3}
    return shared_engine({"num_speculative_tokens": NODES}, **chunks)


def test_no_drafts_where_no_request_could_use_them(engine, plain, monkeypatch):
    """From 0.33 on chunks of prompts propose none; the drafters have to follow all the same."""
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
    texts = [text for text in prompts(12) if len(text) > 100]
    # One after the other: in a larger batch some request could nearly always draft.
    answers = [engine.generate([text], params)[0] for text in texts]
    assert assert_identical(answers, plain.generate(texts, params)) > 60 and len(skipped) > 2
    assert (engine.speculator.draft_tokens >= 0).all(), "marks of vLLM's are no tokens"
    accepted = int(engine.speculator.counters.total.sum())  # of all that is counted
    assert accepted > 0


@pytest.mark.skipif(Version(vllm.__version__) < Version("0.33"), reason="vLLM from 0.33 on")
def test_the_scheduler_says_when_no_request_could_use_them(engine, plain, monkeypatch):
    """As vLLM does it itself from 0.33 on: in chunks of a prompt, and in the last step."""
    assert engine.core.scheduler.can_skip_drafts
    wanted = note_calls(
        monkeypatch,
        engine.speculator,
        "propose",
        lambda *_, num_speculative_tokens, **__: num_speculative_tokens,
    )
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    (text,) = [text for text in prompts(12) if len(text) == 200]
    assert engine.llm.reset_prefix_cache()
    answers = engine.generate([text], params)
    chunks = -(-len(text) // CHUNK)
    assert wanted[:chunks] == [0] * (chunks - 1) + [NODES], "only the last chunk draws a token"
    assert_identical(answers, plain.generate([text], params))
    one = SamplingParams(temperature=0, max_tokens=1)
    del wanted[:]
    engine.generate([text[:20]], one)
    assert wanted == [0]
