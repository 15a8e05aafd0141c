"""In an engine: heads learn from verdicts, each from its own nodes, and the tokens stay vLLM's."""

from __future__ import annotations

import torch
from support.engines import ROOT, make_engine
from support.matrix import PROMPTS, params

from vllm_specblock.feedback.calibration import GREEDY


def serve(engine, plain, temperature: float) -> None:
    """A few answers, each of which has to be vLLM's own."""
    sampling = params(4, temperature=temperature, max_tokens=48)
    assert engine.generate(PROMPTS[:4], sampling) == plain.generate(PROMPTS[:4], sampling)


def mean_betas(engine) -> list[float]:
    """Of each drafter, as a query would ask for it."""
    counts = engine.speculator.counters.as_dict()
    return [
        counts[f"calibration_thousandths_{drafter}"] / 1000 / counts[f"drafted_trees_{drafter}"]
        for drafter in range(1, engine.speculator.counters.num_drafters + 1)
    ]


def test_a_trained_drafter_is_found_to_be_too_flat_for_a_greedy_target(tree, plain):
    (head,) = tree.speculator.draft_policy.drafters
    assert head.calibration.trees.tolist() == [0, 0], "learned before anyone asked"
    serve(tree, plain, 0.0)
    greedy, sampling = head.calibration.trees.tolist()
    assert greedy > 20 and sampling == 0
    assert head.calibration.log[0].exp() > 1.3
    # What is counted for `/metrics` began at 1.5 and went where the learned one is by now.
    (beta,) = mean_betas(tree)
    assert 1.3 < beta < 4
    serve(tree, plain, 1.0)
    assert head.calibration.trees[1] > 20


def test_two_heads_learn_each_for_itself(plain):
    second = {"kind": "specblock", "model": str(ROOT / "examples/two_heads/tables")}
    given = {"calibrate_drafts": False, "second_drafter": second, "draft_policy": "merge"}
    engine = make_engine({"num_speculative_tokens": 24, **given})
    serve(engine, plain, 0.0)
    first, second = engine.speculator.draft_policy.drafters
    assert first.calibration is None and first.beta is None
    betas = mean_betas(engine)
    assert betas[0] == 1 and betas[1] != 1
    greedy = torch.zeros(1, device=second.calibration.log.device)
    assert second.calibration.trees[0] > 20 and second.calibration.of(greedy) != GREEDY
