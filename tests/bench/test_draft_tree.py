"""A tree as a picture and in the terminal: where nodes lie, and that each of them is there."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from rich.console import Console
from support.trees import nodes

from vllm_specblock.bench.draft_tree import (
    ACCEPTED,
    layout,
    save_tree,
    terminal_tree,
)
from vllm_specblock.train.eval.steps import Step

# 1: a, 2: b, 3: a under 1, 4: newline under 3, 5: b under 2
STEP = Step(
    root=9,
    token=[1, 2, 3, 2, 0, 3],
    parent=[-1, 0, 0, 1, 3, 2],
    score=[0.0, -0.1, -0.7, -0.8, -0.9, -1.0],
    forward=[0, 1, 1, 1, 2, 2],
    accepted=[0, 1, 3],
    bonus=4,
)


class Letters:
    def decode(self, ids):
        return ["\n", " ", "a", "b", "$<&x$"][ids[0]]


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


def test_an_svg_has_one_node_per_node(tmp_path):
    pytest.importorskip("matplotlib")
    save_tree(STEP, Letters(), "block", tmp_path / "a" / "tree.svg")
    root = ElementTree.parse(tmp_path / "a" / "tree.svg").getroot()
    ids = {each.get("id"): each for each in root.iter() if each.get("id")}
    drawn = [name for name in ids if name.startswith("node-")]
    assert sorted(drawn) == [f"node-{n}" for n in range(6)]
    labels = {name: "".join(ids[name].itertext()).strip() for name in [*drawn, "bonus"]}
    assert labels["node-1"] == "a 0.90" and labels["node-4"] == "⏎ 0.90"
    assert labels["bonus"] == "$<&x$"  # neither mathematics nor markup
    bold = [n for n in range(6) if ACCEPTED in ElementTree.tostring(ids[f"node-{n}"], "unicode")]
    assert bold == STEP.accepted


def test_the_terminal_shows_every_node_under_its_parent():
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(terminal_tree(STEP, Letters(), "block"))
    assert capture.get().splitlines() == [
        '" "  root',
        '├── "a"  0.90  b1  ✓',
        '│   └── "a"  0.50  b1  ✓',
        '│       ├── "\\n"  0.90  b2',
        '│       └── "$<&x$"  bonus token',
        '└── "b"  0.50  b1',
        '    └── "b"  0.74  b2',
    ]
