"""The walk against a search for the longest matching path."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import nodes, path_to, prefix, to_tree, walk
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees

from vllm_specblock.verify.accept_path import DrawnRows, accept_path_rows

quick = settings(deadline=None, max_examples=120)


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


@quick
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


def test_no_nodes_at_all():
    tree = prefix(to_tree([[]], 1), 0)
    output, accepted, _ = walk(tree, torch.ones(1, 0, dtype=torch.bool), torch.tensor([[4]]), 0)
    assert accepted.tolist() == [0] and output.tolist() == [[4]]


def test_rows_of_a_batch():
    """Chains of three nodes: one cut to a node, one with a placeholder that nothing matches."""
    plain = [(0, 5), (1, 5), (2, 5)]
    tree = to_tree([plain] * 5, 3)
    depth = torch.nn.functional.pad(tree.depth.long(), (1, 0))
    rows = DrawnRows(
        token=torch.tensor([9, 5, 9, 5, -1, 5, 9, 5, 5, 5], dtype=torch.int32),
        drawn=torch.tensor([5, 5, 5, -1, 5, 5, 5, 5, 5, 8]),
        first_row=torch.tensor([0, 2, 6, 10], dtype=torch.int32),
        req_idx=torch.tensor([3, 0, 1]),
    )
    path, accepted = torch.full((5, 4), -7), torch.full((5,), -7, dtype=torch.int32)
    trees = KeptTrees(tree.parent, depth, None, tree.ancestors, None, accepted, path)
    output, num_sampled = accept_path_rows(rows, trees)
    assert num_sampled.tolist() == [2, 2, 4]
    assert output.tolist() == [[5, 5, 0, 0], [5, -1, 0, 0], [5, 5, 5, 8]]
    unused = [-7] * 4
    assert path.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3], unused, [0, 1, 0, 0], unused]
    assert accepted.tolist() == [1, 3, -7, 1, -7]
