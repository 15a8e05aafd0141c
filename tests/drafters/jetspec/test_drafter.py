"""What a causal block makes of a DFlash drafter, and its tree beside that of JetSpec's authors."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.committed import rows_of
from support.mask_blocks import (
    KINDS,
    NODES,
    PAGE,
    TABLES,
    best_paths,
    made_up,
    make_drafter,
    plain_logprobs,
)
from support.trees import texts

from vllm_specblock.drafters.baselines.product_trees import ProductTrees


def drafted(kind: str, **options) -> dict[tuple[int, ...], float]:
    """Path -> score of one request's tree."""
    states, text = made_up(1)
    drafter = make_drafter(kind, **options)
    with torch.no_grad():
        drafter.advance(rows_of([(0, 19)], TABLES[:1], states, text, PAGE))
        return texts(drafter.draft(), 0)


def test_masks_that_are_left_out_change_nothing_before_them():
    shallow, deep = drafted("jetspec", depth=2), drafted("jetspec")
    above = {path: score for path, score in deep.items() if len(path) <= 2}
    assert len(above) > 3 and max(map(len, deep)) > 2
    assert {path: shallow[path] for path in above} == pytest.approx(above, abs=1e-4)


def test_a_block_that_sees_all_of_itself_says_something_else(monkeypatch):
    """The same weights under DFlash's mask: what an engine would draft that took them for it."""
    states, text = made_up(1)
    wanted = plain_logprobs("jetspec", states[:, 0], text[0], 19, 6)
    found = drafted("jetspec", calibrate_drafts=False)
    assert found.keys() == best_paths(wanted).keys()
    monkeypatch.setitem(KINDS, "both", (KINDS["dflash"][0], *KINDS["jetspec"][1:]))
    other = drafted("both", calibrate_drafts=False)
    assert other.keys() != found.keys()


def authors_tree(logprobs, width: int, nodes: int) -> dict[tuple[int, ...], float]:
    """Path -> score: the likeliest node without children gets the `width` best of its depth."""
    best = [sorted(enumerate(row), key=lambda each: -each[1])[:width] for row in logprobs]
    found, waiting = {}, [(0.0, ())]
    while waiting and len(found) < nodes:
        score, path = heapq.heappop(waiting)
        for token, each in best[len(path)][: nodes - len(found)] if len(path) < len(best) else ():
            found[(*path, token)] = each - score
            heapq.heappush(waiting, (score - each, (*path, token)))
    return found


@given(
    st.integers(1, 6).flatmap(
        lambda masks: st.lists(
            st.lists(st.floats(-4, 4, width=16), min_size=9, max_size=9),
            min_size=masks,
            max_size=masks,
        )
    ),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_no_tree_of_the_authors_is_likelier(logits, width, nodes):
    """Of as many nodes, by the sum of path probabilities: the tokens it expects to be accepted."""
    logprobs = torch.tensor(logits).log_softmax(-1)
    theirs = authors_tree(logprobs.tolist(), width, nodes)
    score, token = logprobs.sort(-1, descending=True)
    tree = ProductTrees(len(logits), min(nodes, 9), nodes, "cpu").grow(score[None], token[None])
    ours = texts(tree, 0)
    assert len(ours) >= len(theirs)
    expected = [sum(map(math.exp, each.values())) for each in (ours, theirs)]
    assert expected[0] >= expected[1] - 1e-4
    for path, each in ours.items():  # the same scores for the same paths
        by_hand = sum(float(logprobs[depth, token]) for depth, token in enumerate(path))
        assert each == pytest.approx(by_hand, abs=1e-4)


def test_the_authors_tree_leaves_likelier_paths_out():
    """Where the first mask is nearly sure, its other tokens are hardly worth a node each."""
    logprobs = torch.tensor([[5.0, 0, 0, 0], [2.0, 1.9, 0, 0]]).log_softmax(-1)
    theirs = authors_tree(logprobs.tolist(), 4, 4)
    assert theirs.keys() == {(0,), (1,), (2,), (3,)} != best_paths(logprobs, 4).keys()
    assert len(best_paths(logprobs, NODES)) == 20
