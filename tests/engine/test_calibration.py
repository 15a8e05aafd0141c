"""In an engine: drafters learn from verdicts, and the tokens stay vLLM's."""

from __future__ import annotations

from support.matrix import PROMPTS, params


def serve(engine, plain, temperature: float) -> None:
    """A few answers, each of which has to be vLLM's own."""
    sampling = params(4, temperature=temperature, max_tokens=48)
    assert engine.generate(PROMPTS[:4], sampling) == plain.generate(PROMPTS[:4], sampling)


def test_a_trained_drafter_is_found_to_be_too_flat_for_a_greedy_target(tree, plain):
    (head,) = tree.speculator.draft_policy.drafters
    assert head.calibration.trees.tolist() == [0, 0], "learned before anyone asked"
    serve(tree, plain, 0.0)
    greedy, sampling = head.calibration.trees.tolist()
    assert greedy > 20 and sampling == 0
    assert head.calibration.log[0].exp() > 1.3
    # What is counted for `/metrics` began at 1.5 and went where the learned one is by now.
    counts = tree.speculator.counters.as_dict()
    assert 1.3 < counts["calibration_thousandths", 1] / 1000 / counts["drafted_trees", 1] < 4
    serve(tree, plain, 1.0)
    assert head.calibration.trees[1] > 20
