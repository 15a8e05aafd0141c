"""The picture of a merged tree: where nodes lie, what is accepted, and that it is drawn."""

from __future__ import annotations

import merged_tree_picture as shown
import pytest
import torch
from hypothesis import given
from support.trees import nodes, to_tree

from vllm_specblock.combine.combined import Combined


class Letters:
    def decode(self, ids):
        return "\n ab"[ids[0]]


@given(nodes(max_nodes=25))
def test_no_two_nodes_lie_on_each_other_and_subtrees_do_not_mix(tree):
    parent = [-1, *(up for up, _ in tree)]
    places = shown.layout(parent)
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


@pytest.fixture
def picture():
    # 1: a, 2: b, 3: a under 1, 4: newline under 3, 5: b under 2; slot 6 is not in use
    tree = to_tree([[(0, 2), (0, 3), (1, 2), (3, 0), (2, 3)]], 6)
    origin = torch.tensor([[3, 2, 1, 1, 2, 0]], dtype=torch.uint8)
    return shown.picture_of(Combined(tree, origin), 1, [2, 2, 3, 0], Letters())


def test_accepted_path_is_the_walk_of_what_followed(picture):
    assert picture.accepted == [0, 1, 3]
    assert picture.text == ["·", "a", "b", "a", "⏎", "b"]
    assert picture.parent == [-1, 0, 0, 1, 3, 2] and picture.origin == [0, 3, 2, 1, 1, 2]


def test_the_more_mixed_tree_is_preferred(picture):
    one_head = shown.Picture(picture.text, picture.parent, [0, 1, 1, 1, 1, 1], picture.accepted)
    refused = shown.Picture(picture.text, picture.parent, picture.origin, [0])
    assert shown.mix(picture) > shown.mix(one_head) > shown.mix(refused)


def test_it_is_drawn(picture, tmp_path):
    pytest.importorskip("matplotlib")
    # "$" must not be taken for mathematics.
    odd = shown.Picture(["$x$", *picture.text[1:]], picture.parent, picture.origin, [0, 1, 3])
    shown.draw(odd, tmp_path / "a" / "tree.svg")
    text = (tmp_path / "a" / "tree.svg").read_text()
    for kind in (1, 2, 3):
        assert shown.COLOURS[kind] in text
    # An edge and a border of each accepted node below the root, the root's border, the legend's.
    assert text.count(f"stroke: {shown.ACCEPTED}") == 2 * 2 + 1 + 1
