"""A drafter is left out where a lookup is known to be right, and by nothing that was tried out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_specblock.feedback.skip_gate import BUCKETS, DrafterGate, first_token
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
    gate = DrafterGate(cost=0.2)
    assert gate.asks(np.array([0.0])) and gate.asks(np.array([0.3]))
    assert not gate.asks(np.array([0.95]))
    assert DrafterGate(cost=0.0).asks(np.array([0.95])), "what costs nothing always pays"


def taught(right_at, gain, steps=400, seed=0) -> DrafterGate:
    """Lookups that say 0.9 and are right at another rate; a drafter gains where they are not."""
    gate, draw = DrafterGate(cost=0.2), np.random.default_rng(seed)
    for _ in range(steps):
        sure = np.array([0.9])
        asked = gate.asks(sure)
        right = draw.random() < right_at
        accepted = draw.integers(2, 6) if right else asked * draw.poisson(gain)
        gate.learn(sure, np.array([asked]), np.array([right]), np.array([accepted]))
    return gate


def test_a_lookup_that_is_wrong_more_often_than_it_says_gets_company():
    assert taught(right_at=0.4, gain=1.3).asks(np.array([0.9]))
    assert not taught(right_at=0.95, gain=1.3).asks(np.array([0.9]))


def test_a_drafter_that_gains_nothing_is_left_out():
    gate = DrafterGate(cost=0.2)
    nothing = np.array([0.0])
    for _ in range(60):
        asked = gate.asks(nothing)
        gate.learn(nothing, np.array([asked]), np.array([False]), np.array([0]))
    assert not gate.asks(nothing)


def test_a_batch_decides_together():
    """One drafting serves all: the more are unsure, the more it is worth."""
    gate = DrafterGate(cost=0.2)
    sure, unsure = [0.95] * 7, [0.1]
    assert not gate.asks(np.array(sure)) and gate.asks(np.array(unsure))
    votes = [gate.asks(np.array(sure[:n] + unsure * (8 - n))) for n in range(9 - 1)]
    assert votes == sorted(votes, reverse=True) and votes[0] and not votes[-1]


def test_steps_without_a_tree_teach_nothing():
    gate = DrafterGate(cost=0.2)
    before = gate.seen.copy()
    none = np.zeros(0)
    gate.learn(none, none.astype(bool), none.astype(bool), none.astype(np.int64))
    assert (gate.seen == before).all() and len(before) == BUCKETS
