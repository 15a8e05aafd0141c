"""A tree as a picture and in the terminal: where nodes lie, and that each of them is there."""

from __future__ import annotations

from hypothesis import given
from support.trees import nodes

from vllm_specblock.bench.draft_tree import (
    layout,
)


@given(nodes(max_nodes=25))
def test_no_two_nodes_lie_on_each_other_and_subtrees_do_not_mix(tree):
    parent = [-1, *(up for up, _ in tree)]
    places = layout(parent)
    assert len(set(places)) == len(parent)
    children = {n: [c for c, up in enumerate(parent) if up == n] for n in range(len(parent))}
    for node, below in children.items():
        for child in below:
            assert places[child][0] == places[node][0] + 1
        if below:
            heights = [places[child][1] for child in below]
            assert min(heights) <= places[node][1] <= max(heights)
            assert heights == sorted(heights, reverse=True)
    leaves = sorted(places[n][1] for n, below in children.items() if not below)
    assert leaves == [-float(i) for i in reversed(range(len(leaves)))]
