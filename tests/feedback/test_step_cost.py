"""Costs are found from noisy steps, follow them when they change, and ignore pauses."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specblock.feedback.step_cost import StepCost, cost_per_request


def true(tokens, requests):
    return 4e-3 + 3e-4 * requests + 1e-4 * tokens


def taught(steps=200, change=1.0, seed=0):
    costs, rng = StepCost(), np.random.default_rng(seed)
    for _ in range(steps):
        requests = int(rng.integers(1, 9))
        tokens = requests * int(rng.integers(1, 61))
        noise = 1 + 0.1 * rng.standard_normal()
        costs.observe(tokens, requests, change * true(tokens, requests) * noise)
    return costs


def test_finds_what_a_request_and_a_token_add():
    costs, tokens = taught(), np.array([1, 50, 400])
    for requests in (1, 8):
        assert costs.seconds(tokens, requests) == pytest.approx(true(tokens, requests), rel=0.1)


def test_one_batch_size_and_two_tree_sizes_are_enough():
    costs = StepCost()
    for tokens in [1, 25] * 10:
        costs.observe(tokens, 1, true(tokens, 1))
    assert costs.seconds(np.array([13]), 1)[0] == pytest.approx(true(13, 1), rel=0.05)


def test_follows_when_the_machine_changes():
    costs, rng = taught(), np.random.default_rng(1)
    for _ in range(600):
        tokens = int(rng.integers(1, 61))
        costs.observe(tokens, 1, 2 * true(tokens, 1))
    assert costs.seconds(np.array([30]), 1)[0] == pytest.approx(2 * true(30, 1), rel=0.05)


def test_a_pause_is_not_a_step():
    costs = taught()
    before = costs.seconds(np.array([30]), 1)[0]
    costs.observe(30, 1, 5.0)
    assert costs.seconds(np.array([30]), 1)[0] == before


def test_more_tokens_never_cost_less():
    costs = StepCost()
    for tokens, seconds in [(1, 9e-3), (20, 5e-3), (40, 3e-3)] * 5:
        costs.observe(tokens, 1, seconds)
    found = costs.seconds(np.arange(1, 100), 1)
    assert (np.diff(found) >= 0).all() and (found > 0).all()


def test_before_anything_is_seen_tokens_cost_something():
    found = StepCost().seconds(np.array([1, 100]), 1)
    assert 0 < found[0] < found[1]


def test_what_a_request_adds_beside_its_tokens():
    alone = {8: (5.0, 8), 16: (9.0, 10), 32: (11.0, 10)}
    trees = {8: (3.6, 1), 16: (7.4, 2), 12: (1.0, 1)}  # 12 was profiled once
    assert cost_per_request(alone, trees) == pytest.approx((1.4 / 7 + 1.6 / 8) / 2)
    assert cost_per_request(alone, {}) == 0
    assert cost_per_request({8: (3.0, 8)}, {8: (3.6, 1)}) == 0, "noise is no gain"


TOKENS = np.array([1, 8, 16, 32, 64])
FLAT_THEN_STEEP = np.array([20e-3, 20e-3, 20.4e-3, 24e-3, 33e-3])


def measured() -> StepCost:
    costs = StepCost()
    costs.measured(TOKENS, FLAT_THEN_STEEP)
    return costs


def test_measured_steps_are_believed_at_once():
    costs = measured()
    assert costs.seconds(TOKENS, 1) == pytest.approx(FLAT_THEN_STEEP)
    assert costs.seconds(np.array([48, 96]), 1) == pytest.approx([28.5e-3, 42e-3])
    dips = StepCost()
    dips.measured(np.array([1, 4, 8]), np.array([5.0, 4.0, 6.0]))
    assert dips.seconds(np.array([1, 2, 4, 8]), 1) == pytest.approx([5, 5, 5, 6])


def test_noise_does_not_make_nodes_dear():
    """One request, trees of twelve: steps hardly differ in size, and much in time."""
    found = []
    for seed in range(20):
        costs, rng = measured(), np.random.default_rng(seed)
        for step in range(150):
            tokens = 7 if step % 64 == 0 else 13
            costs.observe(tokens, 1, 1.7 * 20.2e-3 * (1 + 0.2 * rng.standard_normal()))
        root, tree = costs.seconds(np.array([1, 13]), 1)
        found.append(tree / root)
        assert tree == pytest.approx(1.7 * 20.2e-3, rel=0.1), "the machine has become slower"
    assert max(found) < 1.1 and np.median(found) < 1.05


def test_what_contexts_add_is_learned_beside_what_was_measured():
    costs, rng = measured(), np.random.default_rng(0)
    for _ in range(400):
        requests = int(rng.integers(1, 5))
        tokens = 13 * requests
        base = np.interp(tokens, TOKENS, FLAT_THEN_STEEP)
        costs.observe(tokens, requests, base + 2e-3 * requests)
    for requests in (1, 4):
        wanted = np.interp(13 * requests, TOKENS, FLAT_THEN_STEEP) + 2e-3 * requests
        assert costs.seconds(np.array([13 * requests]), requests)[0] == pytest.approx(
            wanted, rel=0.05
        )
