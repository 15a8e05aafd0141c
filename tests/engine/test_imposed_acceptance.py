"""Imposed acceptance in a real engine."""

from __future__ import annotations

import pytest
from lib.acceptance import synthetic_tree
from lib.imposed_acceptance import impose
from support.engines import make_engine, prompts
from vllm import SamplingParams

BEST = [0.8, 0.7, 0.6, 0.5, 0.75, 0.6, 0.5, 0.4]
NODES, TOKENS = 12, 120


def rates(best, count):
    found, left = [], 1.0
    for each in best:
        left *= each
        found.append(left)
    return found + [0.0] * (count - len(found))


def counted(engine):
    values = {each.name: getattr(each, "value", 0) for each in engine.llm.get_metrics()}
    return (values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"])


def test_tau_is_what_the_trees_scores_say(monkeypatch):
    impose(rates(BEST, NODES), monkeypatch.setattr)
    imposed = make_engine({"num_speculative_tokens": NODES})
    head = imposed.speculator.draft_policy.drafters[0]
    tree = synthetic_tree(head.drafter.shape, BEST)
    expected = tree.logprob.exp().sum().item()
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True)
        for i in range(8)
    ]
    answers = imposed.generate(prompts(8), params)
    assert all(len(each.tokens) == TOKENS for (each,) in answers)
    drafts, accepted = counted(imposed)
    # About 300 steps of a standard deviation below 2.5: three of their mean's are 0.45. What is
    # over the end of an answer does not count as accepted: a request loses up to one step's.
    assert drafts > 200 and accepted / drafts == pytest.approx(expected, abs=0.4)
