"""Expansion on the device against plain Python, and its invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafted_blocks import coarse_block, random_block
from support.naive_expand import NaiveExpansion
from support.trees import texts

from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.tree import DraftTree

BRANCHINGS = [(2, 4, 10, 0), (2, 4, 6, 4), (1, 1, 1, 1), (3, 0, 0, 0)]


def expand_both(shape: TreeShape, vocab: int, seed: int, num_requests: int = 2, make=random_block):
    draw = torch.Generator().manual_seed(seed)
    expansion = Expansion(shape, torch.tensor(shape.branching), num_requests)
    naive = [NaiveExpansion(shape) for _ in range(num_requests)]
    block = make(draw, shape, vocab, num_requests)
    expansion.first_block(*block)
    for request, plain in enumerate(naive):
        plain.attach((), 0.0, *(part[request].tolist() for part in block))
    ends = [plain.chain_end for plain in naive]
    for m in range(2, shape.num_blocks + 1):
        starts = expansion.starts(m)
        # A caller reads hidden states at all of them, valid or not.
        rows_so_far = 1 + (m - 2) * shape.num_starts
        assert ((starts.row >= 0) & (starts.row < rows_so_far)).all()
        assert ((starts.position >= 0) & (starts.position < shape.block_size)).all()
        block = make(draw, shape, vocab, num_requests, shape.num_starts)
        expansion.next_block(starts, m, *block)
        for request, plain in enumerate(naive):
            chosen = plain.starts(ends[request])
            for s in range(shape.num_starts):
                if s >= len(chosen):
                    assert not starts.valid[request, s]
                    plain.skip()
                    continue
                text, score, row, position, _ = plain.nodes[chosen[s]]
                assert starts.valid[request, s]
                assert starts.token[request, s] == text[-1]
                assert starts.row[request, s] == row and starts.position[request, s] == position
                plain.attach(text, score, *(part[request, s].tolist() for part in block))
                if s == 0:
                    ends[request] = plain.chain_end
    return expansion.finish(), [plain.finish() for plain in naive]


def check_order(tree, request: int) -> None:
    """Descending scores, parents first and not below their children, unused slots last."""
    size = int(tree.size[request])
    scores = tree.logprob[request, :size]
    assert (scores[1:] <= scores[:-1]).all()
    for node, up in enumerate(tree.parent[request, :size].tolist(), 1):
        assert 0 <= up < node
    assert (tree.parent[request, size:] == -1).all()
    assert (tree.token[request, size:] == 0).all()
    assert torch.isneginf(tree.logprob[request, size:]).all()


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("vocab", [12, 60])
def test_equal_to_plain_python(branching, blocks, vocab):
    for seed in range(6):
        shape = TreeShape(4, blocks, 5, branching, [7, 24, 60, 200][seed % 4])
        tree, expected = expand_both(shape, vocab, seed)
        for request, plain in enumerate(expected):
            found = texts(tree, request)
            assert len(found) == int(tree.size[request]), "equal texts were joined"
            assert found.keys() == plain.keys()
            for text, score in plain.items():
                assert found[text] == pytest.approx(score, abs=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(BRANCHINGS),
    st.integers(1, 120),
    st.integers(0, 10**6),
)
def test_ties_and_order_exactly(block_size, blocks, starts, branching, budget, seed):
    """Node by node: higher score, then lower depth, then the earlier candidate."""
    shape = TreeShape(block_size, blocks, starts, branching, budget)
    tree, expected = expand_both(shape, 11, seed, make=coarse_block)
    for request, plain in enumerate(expected):
        assert list(texts(tree, request).items()) == list(plain.items())
        check_order(tree, request)
    again = DraftTree.from_nodes(tree.token, tree.parent, tree.logprob, tree.size)
    assert torch.equal(tree.ancestors, again.ancestors)
    assert torch.equal(tree.depth, again.depth)


def test_a_smaller_budget_is_a_cut():
    small, large = (
        expand_both(TreeShape(4, 2, 8, (2, 4, 10, 0), budget), 40, seed=4)[0] for budget in (24, 60)
    )
    for name in DraftTree.TENSORS:
        assert torch.equal(getattr(large.prefix(24), name), getattr(small, name)), name


def test_paths_too_long_for_a_key():
    with pytest.raises(ValueError, match="draft paths of 256 tokens, but at most 255"):
        TreeShape(32, 8, 8, (2, 4, 6, 4), 60)


def test_a_node_is_of_the_forward_whose_candidate_was_kept():
    """Block 1: 5 (or 6), then 7 (or 8). Block 2 starts after 5, 7 and after 5."""
    expansion = Expansion(TreeShape(2, 2, 2, (2, 2, 2, 2), 20), torch.tensor([2, 2, 2, 2]), 1)
    bucket = torch.zeros(1, 2, dtype=torch.int64)
    expansion.first_block(
        torch.tensor([[[0.6, 0.4], [0.5, 0.3]]]).log(), torch.tensor([[[5, 6], [7, 8]]]), bucket
    )
    starts = expansion.starts(2)
    assert starts.token.tolist() == [[7, 5]]
    expansion.next_block(
        starts,
        2,
        torch.tensor([[[[0.9, 0.1], [0.8, 0.2]], [[0.7, 0.2], [0.6, 0.4]]]]).log(),
        # After 5, block 2 says 7 more surely than block 1 did, and 8 less surely.
        torch.tensor([[[[1, 2], [3, 4]], [[7, 8], [9, 10]]]]),
        bucket[:, None].expand(1, 2, 2),
    )
    selection = expansion.select()
    found = dict(zip(texts(selection.tree, 0), expansion.blocks(selection)[0].tolist()))
    assert found == {
        (5,): 1,
        (6,): 1,
        (5, 7): 2,
        (5, 8): 1,
        (5, 7, 1): 2,
        (5, 7, 2): 2,
        (5, 7, 1, 3): 2,
        (5, 7, 1, 4): 2,
        (5, 7, 9): 2,
        (5, 7, 10): 2,
    }
    assert expansion.blocks(selection)[0, int(selection.tree.size[0]) :].tolist() == [0] * 10
