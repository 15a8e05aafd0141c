"""The picture of a merged tree: what is accepted, which tree is shown, and its colours."""

from __future__ import annotations

from dataclasses import replace

import merged_tree_picture as shown
import pytest
import torch
from support.trees import to_tree

from vllm_specblock.bench.figures.style import ACCEPTED
from vllm_specblock.bench.figures.tree_picture import save_tree
from vllm_specblock.combine.combined import Combined


class Letters:
    def decode(self, ids):
        return "\n ab"[ids[0]]


@pytest.fixture
def picture():
    # 1: a, 2: b, 3: a under 1, 4: newline under 3, 5: b under 2; slot 6 is not in use
    tree = to_tree([[(0, 2), (0, 3), (1, 2), (3, 0), (2, 3)]], 6)
    origin = torch.tensor([[3, 2, 1, 1, 2, 0]], dtype=torch.uint8)
    return shown.picture_of(Combined(tree, origin), 1, [2, 2, 3, 0], Letters())


def test_accepted_path_is_the_walk_of_what_followed(picture):
    assert picture.accepted == [0, 1, 3]
    assert picture.text == ["·", "a", "b", "a", "⏎", "b"]
    assert picture.parent == [-1, 0, 0, 1, 3, 2] and picture.kind == [0, 3, 2, 1, 1, 2]


def test_the_more_mixed_tree_is_preferred(picture):
    one_head = replace(picture, kind=[0, 1, 1, 1, 1, 1])
    refused = replace(picture, accepted=[0])
    assert shown.mix(picture) > shown.mix(one_head) > shown.mix(refused)


def test_each_kind_of_node_has_its_colour(picture, tmp_path):
    pytest.importorskip("matplotlib")
    save_tree(picture, shown.LEGEND, tmp_path / "a" / "tree.svg")
    text = (tmp_path / "a" / "tree.svg").read_text()
    for kind in (1, 2, 3):
        assert shown.COLOURS[kind] in text
    # An edge and a border of each accepted node below the root, the root's border, the legend's.
    assert text.count(f"stroke: {ACCEPTED}") == 2 * 2 + 1 + 1
