"""α_k (SpecBlock, appendix C) on cases that are counted by hand."""

from __future__ import annotations

from paper_measure import MainPathFigures, main_path

from vllm_specblock.train.eval.steps import Step


def step(parent: list[int], accepted: list[int]) -> Step:
    """A tree of nodes 1, 2, … in descending order of score; tokens do not matter."""
    count = len(parent) + 1
    score = [-0.1 * node for node in range(count)]
    return Step(0, list(range(count)), [-1, *parent], score, [0] * count, [0, *accepted], 99)


def test_the_main_path_is_the_best_child_of_every_node():
    tree = step([0, 0, 2, 1, 3, 4, 4, 6], [])
    assert main_path(tree) == [1, 4, 6, 8]
    assert main_path(step([], [])) == []


def test_alpha_k_counts_the_main_path_alone():
    parent = [0, 0, 1, 3, 2, 4]  # main path 1, 3, 4, 6
    whole = step(parent, [1, 3, 4, 6])
    short = step(parent, [1, 3])  # 4 is wrong
    aside = step(parent, [2, 5])  # 1 is wrong, though two tokens are accepted
    early = step([0, 1], [1, 2])  # right to its end, a chain of two
    found = MainPathFigures.of([whole, short, aside, early], depth=5)
    assert found.reached == [4, 3, 2, 1, 0]
    assert found.hits == [3, 3, 1, 1, 0]
    assert found.alpha == [3 / 4, 1, 1 / 2, 1, None]
