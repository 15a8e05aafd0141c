"""The walk against a search for the longest matching path."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, path_to, to_tree, walk


@st.composite
def cases(draw):
    """Trees over three tokens, draws over the same three: long matches, many twins."""
    batch = draw(st.lists(nodes(max_nodes=24, vocab=3), min_size=1, max_size=3))
    slots = max(1, *(len(tree) for tree in batch)) + draw(st.integers(0, 2))
    sampled = [
        draw(st.lists(st.integers(0, 2), min_size=slots + 1, max_size=slots + 1)) for _ in batch
    ]
    live = [draw(st.integers(0, slots)) for _ in batch]
    return batch, slots, torch.tensor(sampled), live


def check_longest_path(batch, slots, sampled, scheduled, max_depth=None):
    tree = to_tree(batch, slots)
    live = torch.arange(slots) < torch.tensor(scheduled)[:, None]
    max_depth = int(tree.depth.max()) if max_depth is None else max_depth
    output, accepted_nodes, paths = walk(tree, live, sampled, max_depth)
    for request, plain in enumerate(batch):
        z = sampled[request].tolist()
        reached = [
            path
            for path in (path_to(plain, n) for n in range(min(len(plain), scheduled[request]) + 1))
            if len(path) <= max_depth + 1
            and all(plain[child - 1][1] == z[up] for up, child in itertools.pairwise(path))
        ]
        best = max(reached, key=lambda path: (len(path), -path[-1]))
        accepted = len(best) - 1
        beyond = [0] * (max_depth - accepted)
        assert accepted_nodes[request] == accepted
        assert paths[request].tolist() == best + beyond
        assert output[request].tolist() == [z[node] for node in best] + beyond


@settings(deadline=None, max_examples=120)
@given(cases(), st.none() | st.integers(0, 4))
def test_longest_matching_path(case, max_depth):
    """What lies too deep is not accepted."""
    check_longest_path(*case, max_depth=max_depth)


@pytest.mark.parametrize("size", [63, 64, 128, 256])
@pytest.mark.parametrize("vocab", [1, 2])
def test_longest_matching_path_over_several_words(size, vocab):
    """One token: everything matches, and the sign bits of the words with it."""
    draw = torch.Generator().manual_seed(size)

    def integer(below):
        return int(torch.randint(0, below, (), generator=draw))

    # Parents close by: deep trees.
    batch = [
        [(max(0, node - integer(3)), integer(vocab)) for node in range(count)]
        for count in (size, size - 1, 5)
    ]
    sampled = torch.randint(0, vocab, (3, size + 1), generator=draw)
    check_longest_path(batch, size, sampled, [size, size // 2, size])
