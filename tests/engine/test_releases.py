"""What we do for releases that are not the installed one."""

from __future__ import annotations

from support.engines import assert_identical, prompts, shared_engine
from vllm import SamplingParams


def test_no_drafts_where_no_request_could_use_them(plain, monkeypatch):
    """From 0.33 on chunks of prompts propose none; the drafters have to follow all the same."""
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 3}  # as in test_sessions.py
    engine = shared_engine({"num_speculative_tokens": 5}, **chunks)
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
