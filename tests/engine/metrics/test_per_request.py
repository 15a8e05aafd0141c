"""vLLM's per-request metrics of speculation, held against what verification said of each tree."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.engines import make_engine, prompts
from vllm import SamplingParams

from vllm_specblock.feedback.verified_trees import VerifiedTrees

NODES = 12
Steps = dict[str, list[tuple[int, int, int]]]
"""Request → of every step with a tree: nodes in its slots, nodes of ours, accepted nodes."""


@pytest.fixture(scope="module")
def engine():
    """Of trees that seldom fill their slots, since many are empty: a lookup finds what it finds."""
    return make_engine(
        {"kind": "ngram", "model": None, "num_speculative_tokens": NODES},
        per_request_spec_decode_metrics="detailed",
    )


@pytest.fixture
def verified(engine, monkeypatch) -> Steps:
    steps: Steps = defaultdict(list)
    count = engine.speculator.counters.verified

    def noting(trees: VerifiedTrees) -> None:
        count(trees)
        ours = trees.judged.sum(1).tolist()
        for req_idx, slots, nodes, accepted in zip(
            trees.req_idx.tolist(), trees.num_run.tolist(), ours, trees.accepted.tolist()
        ):
            if slots:
                request = engine.runner.req_states.index_to_req_id[req_idx]
                steps[request].append((slots, nodes, accepted))

    monkeypatch.setattr(engine.speculator.counters, "verified", noting)
    return steps


def looping(count: int) -> list[dict[str, list[int]]]:
    """Prompts that repeat themselves, so that a lookup finds something."""
    return [{"prompt_token_ids": each[:20] * 3} for each in prompts(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_is_told_what_verification_said(engine, verified, temperature):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    answers = engine.llm.generate(looping(6), params, use_tqdm=False)
    assert len(verified) == len(answers) == 6
    told_nodes = own_nodes = 0
    for answer in answers:
        (steps,) = (
            found
            for request, found in verified.items()
            if request.split("-")[0] == answer.request_id
        )
        told = answer.outputs[0].spec_decode_metrics
        # What was verified after a request's last token is nobody's.
        assert 0 <= len(steps) - len(told.per_step_accepted) <= 1
        steps = steps[: len(told.per_step_accepted)]
        # Nodes after max_tokens are not counted.
        emitted = len(answer.outputs[0].token_ids) - 1  # the first token is the prompt's
        behind = sum(1 + accepted for *_, accepted in steps) - emitted
        steps[-1] = (*steps[-1][:2], steps[-1][2] - behind)
        assert behind >= 0 and told.per_step_accepted == [accepted for *_, accepted in steps]
        # vLLM's scheduler counts a tree's slots, whether a node is in them or not.
        assert told.per_step_drafted == [slots for slots, *_ in steps]
        assert told.num_draft_tokens == sum(told.per_step_drafted)
        given = told.to_dict()
        accepted = sum(accepted for *_, accepted in steps)
        assert given["num_accepted_draft_tokens"] == accepted
        assert given["mean_acceptance_length"] == pytest.approx(emitted / len(steps))
        assert all(accepted <= nodes <= slots for slots, nodes, accepted in steps)
        told_nodes += told.num_draft_tokens
        own_nodes += sum(nodes for _, nodes, _ in steps)
    assert 0 < own_nodes <= told_nodes
