"""An engine's answer step by step is its answer, and plain vLLM's."""

from __future__ import annotations

from support.engines import make_engine

from vllm_specblock.engine.offline.answering import ACCEPTED, DRAFTS, Answering


def test_steps_add_up_to_the_answer(plain):
    # vLLM's counters are the last engine's: whoever makes one throws those of the others away.
    tree = make_engine({"num_speculative_tokens": 24})
    engine = Answering.__new__(Answering)
    engine.llm, engine.stopwatch = tree.llm, None
    prompts = [[5, 6, 7, 8] * 3, [9, 10, 11] * 5]
    job = {
        "prompts": prompts,
        "seeds": [3, 4],
        "temperature": 0.8,
        "max_tokens": 30,
        "ignore_eos": True,
    }
    said: list[list[list[int]]] = [[], []]
    found = engine.answer(job, lambda index, new: said[index].append(new))
    assert [[token for new in steps for token in new] for steps in said] == found["ids"]
    assert [len(ids) for ids in found["ids"]] == [30, 30]
    # A step says all that was accepted in it.
    steps, drafts = sum(map(len, said)), found["counters"][DRAFTS]
    assert drafts == steps - 2  # a prompt is not drafted for
    assert found["counters"][ACCEPTED] >= 60 - steps  # the last step's may go beyond the end
    assert found["wall"] > 0 and found["cpu"] > 0
    for other in (tree, plain):
        engine.llm = other.llm
        assert engine.answer(job)["ids"] == found["ids"]
