"""The union of two trees as §4 of the merged-tree paper writes it, before order and cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from support.trees import Nodes, nodes, path_matrix, to_tree

from vllm_specblock.combine.merge import merge
from vllm_specblock.tree import DraftTree

quick = settings(deadline=None, max_examples=60)
some = nodes(max_nodes=14).filter(len)


@dataclass
class PaperUnion:
    """The paper's objects, node 0 being the root; nested lists."""

    token: list[int]
    parent: list[int]
    mask: list[list[int]]
    position: list[int]
    paths: list[list[int]]


def paper_union(first: Nodes, second: Nodes) -> PaperUnion:
    n1, n2 = len(first), len(second)

    def phi(i: int) -> int:
        return 0 if i == 0 else n1 + i

    parent = {j: first[j - 1][0] for j in range(1, n1 + 1)}
    parent |= {j: phi(second[j - n1 - 1][0]) for j in range(n1 + 1, n1 + n2 + 1)}
    everyone = range(n1 + n2 + 1)

    def ancestors(i: int) -> list[int]:
        return [0] if i == 0 else [*ancestors(parent[i]), i]

    # M∪ by its blocks: the root's column, M₁, M₂, and zeros between the two.
    mask = [[0] * (n1 + n2 + 1) for _ in everyone]
    for i in everyone:
        mask[i][0] = 1
        block = range(1, n1 + 1) if i <= n1 else range(n1 + 1, n1 + n2 + 1)
        for j in block:
            mask[i][j] = int(j in ancestors(i))
    position = [0] * (n1 + n2 + 1)
    for i in range(1, n1 + n2 + 1):
        position[i] = position[parent[i]] + 1
    leaves = [i for i in everyone if i not in parent.values()]
    width = max(map(len, map(ancestors, leaves)))
    paths = [[*ancestors(leaf), *[-1] * (width - len(ancestors(leaf)))] for leaf in leaves]
    token = [what for _, what in first + second]
    return PaperUnion(token, [parent[j] for j in everyone[1:]], mask, position, paths)


def our_union(first: Nodes, second: Nodes) -> DraftTree:
    """Merged with scores that fall from each node to the next, which keeps the paper's order."""
    count, pair = len(first) + len(second), []
    falls = -torch.arange(1.0, count + 1)[None]
    for plain, scores in ((first, falls[:, : len(first)]), (second, falls[:, len(first) :])):
        pair.append(replace(to_tree([plain], len(plain)), logprob=scores))
    return merge(*pair, "disjoint", count)[0]


def check_equal(tree: DraftTree, paper: PaperUnion) -> None:
    assert tree.token[0].tolist() == paper.token
    assert tree.parent[0].tolist() == paper.parent
    assert tree.ancestor_mask()[0].int().tolist() == paper.mask
    assert [0, *tree.depth[0].tolist()] == paper.position
    assert path_matrix(tree, 0) == paper.paths


FIRST = [(0, 11), (0, 12), (1, 13)]
SECOND = [(0, 21), (1, 22), (1, 23)]
"""n₁ = n₂ = 3, as in Figure 1."""


def test_figure_1():
    """1 ↦ 4, 2 ↦ 5, 3 ↦ 6, written out by hand."""
    expected = PaperUnion(
        token=[11, 12, 13, 21, 22, 23],
        parent=[0, 0, 1, 0, 4, 4],
        mask=[
            [1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 0],
            [1, 0, 0, 0, 1, 0, 0],
            [1, 0, 0, 0, 1, 1, 0],
            [1, 0, 0, 0, 1, 0, 1],
        ],
        position=[0, 1, 1, 2, 1, 2, 2],
        paths=[[0, 2, -1], [0, 1, 3], [0, 4, 5], [0, 4, 6]],
    )
    assert paper_union(FIRST, SECOND) == expected
    check_equal(our_union(FIRST, SECOND), expected)


@quick
@given(some, some)
def test_any_two_trees(first, second):
    check_equal(our_union(first, second), paper_union(first, second))


@quick
@given(some, some)
def test_a_disjoint_merge_has_the_papers_paths(first, second):
    """Ordered by score the nodes are numbered anew, but the candidate set is C∪ (§3)."""
    paper = paper_union(first, second)
    pair = to_tree([first], len(first)), to_tree([second], len(second))
    tree = merge(*pair, "disjoint", len(first) + len(second))[0]

    def candidates(paths, token):
        return Counter(tuple(token[node - 1] for node in row if node > 0) for row in paths)

    ours = candidates(path_matrix(tree, 0), tree.token[0].tolist())
    assert ours == candidates(paper.paths, paper.token)
