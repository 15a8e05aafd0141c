"""A drafter is left out where a lookup is known to be right, and by nothing that was tried out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specblock.feedback.skip_gate import DrafterGate, first_token
from vllm_specblock.tree import DraftTree


def test_how_sure_a_tree_is_of_the_next_token():
    token = torch.tensor([[5, 6, 7, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    parent = torch.tensor([[0, 0, 1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    share = torch.tensor([[0.5, 0.3, 0.25, 0], [0.9, 0, 0, 0], [0, 0, 0, 0]])
    trees = DraftTree.from_nodes(
        token, parent, share.log(), torch.tensor([3, 1, 0], dtype=torch.int32)
    )
    assert first_token(trees) == pytest.approx(torch.tensor([0.8, 0.9, 0.0]))


def test_before_anything_was_seen_a_lookup_is_believed():
    gate = DrafterGate()
    assert gate.expects(np.array([0.0])) == 1
    assert gate.expects(np.array([0.95])) < 0.1


def taught(right_at, gain, steps=400, seed=0) -> DrafterGate:
    """Lookups that say 0.9 and are right at another rate; a drafter gains where they are not."""
    gate, draw = DrafterGate(), np.random.default_rng(seed)
    for step in range(steps):
        right, asked = draw.random() < right_at, step % 3 == 0
        accepted = draw.integers(2, 6) if right else asked * draw.poisson(gain)
        found = np.array([0.9]), np.array([asked]), np.array([right]), np.array([accepted])
        gate.learn(*found)
    return gate


@pytest.mark.parametrize(("right_at", "gain"), [(0.4, 1.3), (0.95, 1.3), (0.5, 0.0)])
def test_what_a_drafter_adds_is_learned(right_at, gain):
    expected = (1 - right_at) * gain
    found = taught(right_at, gain).expects(np.array([0.9, 0.9]))
    assert found == pytest.approx(2 * expected, abs=0.25)
