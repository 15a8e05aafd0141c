"""Merged trees against plain Python, and what both ways to merge have in common."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, to_tree, walk

from vllm_specblock.combine import merge as merge_and_agree
from vllm_specblock.tree import DraftTree

HOWS = ["disjoint", "trie"]
quick = settings(deadline=None, max_examples=80)


def merge(*args) -> DraftTree:
    """The trees alone, of at most 16 nodes a path."""
    return merge_and_agree(*args, 16)[0]


@st.composite
def pairs(draw, vocab: int = 3):
    """Two trees per request over few tokens: twins within a head and across, and many ties."""
    count, out = draw(st.integers(1, 3)), []
    for _ in range(2):
        plain = [draw(nodes(max_nodes=16, vocab=vocab)) for _ in range(count)]
        slots = max(1, *map(len, plain)) + draw(st.integers(0, 2))
        steps = draw(st.lists(st.sampled_from([0, 1, 4]), min_size=slots, max_size=slots))
        score = torch.tensor(steps).cumsum(0) / -8  # sums are exact
        tree = to_tree(plain, slots)
        out.append(replace(tree, logprob=torch.where(tree.parent >= 0, score, float("-inf"))))
    return tuple(out)


def slots_of(pair) -> int:
    return sum(tree.token.shape[1] for tree in pair)


def node_texts(tree: DraftTree, request: int) -> list[tuple]:
    """Text of the root and of every node in use, twins included."""
    known = [()]
    parent, token = tree.parent[request].tolist(), tree.token[request].tolist()
    for up, what in list(zip(parent, token))[: int(tree.size[request])]:
        known.append((*known[up], what))
    return known


def merge_plainly(pair, request: int, how: str, budget: int) -> list[tuple]:
    """(parent, token, score, origin) of every node that the merged tree is to have.

    What makes two nodes one is their name: where they come from, or what they say.
    """
    candidates, before = [], 0
    for head, tree in enumerate(pair, 1):
        said = node_texts(tree, request)
        names = said if how == "trie" else [(), *((head, i) for i in range(1, len(said)))]
        for index in range(1, len(said)):
            score = float(tree.logprob[request, index - 1])
            up = names[int(tree.parent[request, index - 1])]
            rank = (-score, len(said[index]), before + index)
            candidates.append((rank, names[index], up, said[index][-1], score, head))
        before += tree.token.shape[1]
    merged: dict[tuple, list] = {}
    for _, name, up, token, score, head in sorted(candidates):
        merged.setdefault(name, [up, token, score, 0])[-1] |= head
    number = {name: place for place, name in enumerate([(), *merged])}
    return [(number[up], *rest) for up, *rest in merged.values()][:budget]


@pytest.mark.parametrize("how", HOWS)
@quick
@given(pairs(), st.data())
def test_equal_to_plain_python(how, pair, data):
    """Order, parents, scores and origins, node by node, at every budget; depths and ancestors."""
    budget = data.draw(st.integers(1, slots_of(pair) + 2))
    tree = merge(*pair, how, budget)
    for request in range(len(tree.token)):
        size = int(tree.size[request])
        fields = (tree.parent, tree.token, tree.logprob, tree.origin)
        found = list(zip(*(field[request, :size].tolist() for field in fields)))
        assert found == merge_plainly(pair, request, how, budget)
        assert (tree.parent[request, size:] == -1).all()
        assert torch.isneginf(tree.logprob[request, size:]).all()
        assert (tree.origin[request, size:] == 0).all()
    assert tree.origin.dtype == torch.uint8 and tree.origin.shape == tree.token.shape
    again = DraftTree.from_nodes(tree.token, tree.parent, tree.logprob, tree.size)
    for name in DraftTree.TENSORS:
        assert torch.equal(getattr(tree, name), getattr(again, name)), name


@quick
@given(pairs(), st.integers(0, 10**6))
def test_both_ways_accept_the_same_text(pair, seed):
    """As long as the budget does not bind. Nodes of equal text draw the same token."""
    drawn: dict[tuple, int] = {}
    luck = random.Random(seed)

    def accepted(how):
        tree = merge(*pair, how, slots_of(pair))
        sampled = torch.zeros(len(tree.token), slots_of(pair) + 1, dtype=torch.int64)
        for request in range(len(sampled)):
            for node, text in enumerate(node_texts(tree, request)):
                name = (request, *text)
                sampled[request, node] = drawn.setdefault(name, luck.randrange(3))
        return walk(tree, tree.parent >= 0, sampled, 16)[:2]

    for disjoint, trie in zip(*map(accepted, HOWS)):
        assert torch.equal(disjoint, trie)
