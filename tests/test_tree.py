"""DraftTree's invariants, against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import ancestor_sets, nodes, path_to, to_tree
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits, unpack_bits, words_for

from vllm_specblock.tree import MAX_NODES, DraftTree

batches = st.lists(nodes(), min_size=1, max_size=4)
quick = settings(deadline=None, max_examples=60)


def bits_of(words: torch.Tensor) -> set[int]:
    return {
        64 * index + bit
        for index, word in enumerate(words.tolist())
        for bit in range(64)
        if word >> bit & 1
    }


@quick
@given(batches, st.integers(0, 5))
def test_ancestors_and_depths(batch, spare):
    slots = max(1, *(len(tree) for tree in batch)) + spare
    tree = to_tree(batch, slots)
    for request, plain in enumerate(batch):
        for node, expected in enumerate(ancestor_sets(plain, slots)):
            assert bits_of(tree.ancestors[request, node]) == expected
        for node in range(1, len(plain) + 1):
            assert tree.depth[request, node - 1] == len(path_to(plain, node)) - 1


@pytest.mark.parametrize("size", [62, 63, 64, 127, 128, 200, MAX_NODES])
@pytest.mark.parametrize("chain", [False, True])
def test_ancestors_of_large_trees(size, chain):
    """A chain sets every bit, the sign bits among them."""
    draw = torch.Generator().manual_seed(size)
    plain = [
        (up if chain else int(torch.randint(0, up + 1, (), generator=draw)), 0)
        for up in range(size)
    ]
    tree = to_tree([plain], size)
    assert tree.ancestors.shape == (1, size + 1, words_for(size))
    for node, expected in enumerate(ancestor_sets(plain, size)):
        assert bits_of(tree.ancestors[0, node]) == expected
    mask = tree.ancestor_mask()[0]
    assert mask.shape == (size + 1, size + 1)
    assert torch.equal(mask.sum(1)[1:], tree.depth[0] + 1)
    assert tree.ancestors.is_contiguous()


@quick
@given(nodes())
def test_a_known_depth_changes_nothing(plain):
    tree = to_tree([plain], max(1, len(plain)))
    longest = int(tree.depth.max())
    known = DraftTree.from_nodes(tree.token, tree.parent, tree.logprob, tree.size, longest)
    for name in DraftTree.TENSORS:
        assert torch.equal(getattr(known, name), getattr(tree, name)), name


@quick
@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_bits_pack_and_unpack(flags):
    flags = torch.tensor([flags])
    assert torch.equal(unpack_bits(pack_bits(flags), flags.shape[1]), flags)


@quick
@given(batches)
def test_best_chain_is_the_best_path(batch):
    tree = to_tree(batch, max(1, *(len(tree) for tree in batch)))
    chain = tree.chains_where(torch.ones(len(batch)))
    for request, plain in enumerate(batch):
        gains = {
            node: sum(math.exp(-0.1 * step) for step in path_to(plain, node)[1:])
            for node in range(1, len(plain) + 1)
        }
        size = int(chain.size[request])
        kept = chain.logprob[request, :size].exp().sum().item()
        assert kept == pytest.approx(max(gains.values(), default=0.0), abs=1e-5)
        assert chain.parent[request].tolist() == [
            step if step < size else -1 for step in range(chain.parent.shape[1])
        ]
        texts = [[plain[step - 1][1] for step in path_to(plain, node)[1:]] for node in gains]
        assert chain.token[request, :size].tolist() in [*texts, []]


def test_too_many_nodes_is_one_sentence():
    with pytest.raises(ValueError, match="at most 256 nodes, and 257 were given"):
        DraftTree.empty(1, MAX_NODES + 1, "cpu")
