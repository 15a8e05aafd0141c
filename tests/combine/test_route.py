"""Routing against plain Python, the shares of a budget, and whose nodes a tree has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, to_tree

from vllm_specblock.combine import agreement, confidence, route
from vllm_specblock.tree import DraftTree

HOWS = ["mean", "sum"]
quick = settings(deadline=None, max_examples=80)


@st.composite
def pairs(draw):
    """Two trees of as many slots per request, with falling scores of their own."""
    count, slots = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    out = []
    for _ in range(2):
        tree = to_tree([draw(nodes(max_nodes=slots, vocab=3)) for _ in range(count)], slots)
        falls = st.lists(st.integers(0, 40), min_size=slots, max_size=slots)
        score = torch.tensor([draw(falls) for _ in range(count)]).cumsum(1) / -16
        out.append(replace(tree, logprob=torch.where(tree.parent >= 0, score, float("-inf"))))
    return tuple(out)


def mu(tree: DraftTree, request: int, how: str) -> float:
    """§5 of the paper, in double precision."""
    size = int(tree.size[request])
    total = sum(math.exp(score) for score in tree.logprob[request, :size].tolist())
    return total / size if how == "mean" and size else total


@pytest.mark.parametrize("how", HOWS)
@quick
@given(pairs())
def test_equal_to_plain_python(how, pair):
    routed, agreed = route(*pair, how)
    assert torch.equal(agreed, agreement(*pair))
    sure = [confidence(tree, how) for tree in pair]
    for request in range(len(agreed)):
        ours, theirs = (mu(tree, request, how) for tree in pair)
        for values, expected in zip(sure, (ours, theirs)):
            assert values[request].item() == pytest.approx(expected, rel=1e-5)
        size = int(routed.size[request])
        head = int(routed.origin[request, 0]) or 1
        if abs(theirs - ours) > 1e-5 * ours:  # in single precision others are a tie
            assert head == 1 + (theirs > ours)
        for name in DraftTree.TENSORS:
            whole, part = getattr(routed, name), getattr(pair[head - 1], name)
            assert torch.equal(whole[request], part[request]), name
        slots = routed.origin.shape[1]
        assert routed.origin[request].tolist() == [head] * size + [0] * (slots - size)


@pytest.mark.parametrize("how", HOWS)
def test_ties_and_empty_trees(how):
    some, none = to_tree([[(0, 1), (1, 2)]], 4), DraftTree.empty(1, 4, "cpu")
    # exp of this rounds to 0.
    hopeless = replace(some, logprob=some.logprob - 500)
    assert confidence(hopeless, how).item() == confidence(none, how).item() == 0
    for first, second, expected in [
        (some, some, False),
        (some, none, False),
        (none, some, True),
        (none, none, False),
        (hopeless, none, False),
        (none, hopeless, True),
        (hopeless, some, True),
    ]:
        chosen = second if expected else first
        routed, _ = route(first, second, how)
        assert routed.size.tolist() == chosen.size.tolist()
        assert torch.equal(routed.origin, (1 + expected) * chosen.origins())


def test_agreement():
    said, other, none = ([(0, 3), (1, 4)], [(0, 4), (0, 3)], [])
    zero = [(0, 0)]  # what slots not in use hold, too
    first = to_tree([said, said, zero, none, none, zero], 3)
    second = to_tree([[(0, 3)], other, none, zero, none, zero], 3)
    assert agreement(first, second).tolist() == [True, False, False, False, False, True]


def test_origin_follows_the_best_path():
    """A chain for the first request only: its nodes 1 and 3, whose heads differ."""
    plain = [(0, 1), (0, 2), (1, 3)]
    origin = torch.tensor([[1, 2, 3, 0]], dtype=torch.uint8).expand(2, -1)
    tree = replace(to_tree([plain, plain], 4), origin=origin)
    mixed = tree.chains_where(torch.tensor([True, False]))
    assert mixed.token.tolist() == [[1, 3, 0, 0], [1, 2, 3, 0]]
    assert mixed.parent.tolist() == [[0, 1, -1, -1], [0, 0, 1, -1]]
    assert mixed.origin.tolist() == [[1, 3, 0, 0], [1, 2, 3, 0]]
    assert mixed.origin.dtype == torch.uint8
