"""An engine's answer step by step is its answer, and plain vLLM's."""

from __future__ import annotations

from support.engines import make_engine

from vllm_specblock.engine.metrics.acceptance import STEPS, TOKENS, acceptance_length_of
from vllm_specblock.engine.offline.answering import Answering


def test_steps_add_up_to_the_answer(plain):
    # vLLM's counters are the last engine's: a new engine discards those of the others.
    tree = make_engine({"num_speculative_tokens": 24})
    engine = Answering.__new__(Answering)
    engine.llm, engine.stopwatch = tree.llm, None
    job = {"prompts": [[5, 6, 7, 8] * 3, [9, 10, 11] * 5], "seeds": [3, 4]}
    job |= {"temperature": 0.8, "max_tokens": 30, "ignore_eos": True}
    said: list[list[list[int]]] = [[], []]
    found = engine.answer(job, lambda index, new: said[index].append(new))
    assert [[token for new in steps for token in new] for steps in said] == found["ids"]
    assert [len(ids) for ids in found["ids"]] == [30, 30]
    # A step says all that was accepted in it; the prompt's is not a decode step.
    steps, counters = sum(map(len, said)) - 2, found["counters"]
    assert counters[STEPS] == counters["vllm:spec_decode_num_drafts"] == steps
    assert counters[TOKENS] == 60
    assert counters["vllm:spec_decode_num_accepted_tokens"] == 60 - 2 - steps
    assert acceptance_length_of([counters]) == (60 - 2) / steps
    assert found["wall"] > 0 and found["cpu"] > 0
    for other in (tree, plain):
        engine.llm = other.llm
        assert engine.answer(job)["ids"] == found["ids"]
