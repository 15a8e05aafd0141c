"""Expansion on the device against plain Python, and its invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafted_blocks import coarse_block, random_block
from support.naive_expand import NaiveExpansion
from support.trees import prefix, texts
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.tree import DraftTree

BRANCHINGS = [(2, 4, 10, 0), (2, 4, 6, 4), (1, 1, 1, 1), (3, 0, 0, 0)]


def expand_both(shape: TreeShape, vocab: int, seed: int, num_requests: int = 2, make=random_block):
    draw = torch.Generator().manual_seed(seed)
    expansion = Expansion(shape, torch.tensor(shape.branching), num_requests)
    naive = [NaiveExpansion(shape) for _ in range(num_requests)]
    block = make(draw, shape, vocab, num_requests, 1)
    starts = expansion.attach(None, *block)
    for request, plain in enumerate(naive):
        plain.attach((), 0.0, *(part[request, 0].tolist() for part in block))
    ends = [plain.chain_end for plain in naive]
    for m in range(2, shape.num_blocks + 1):
        # A caller reads hidden states at all of them, valid or not.
        rows_so_far = 1 + (m - 2) * shape.num_starts
        assert ((starts.row >= 0) & (starts.row < rows_so_far)).all()
        assert ((starts.position >= 0) & (starts.position < shape.block_size)).all()
        block = make(draw, shape, vocab, num_requests, shape.num_starts)
        grown = expansion.attach(starts, *block)
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
        starts = grown
    return starts, [plain.finish() for plain in naive]


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
        assert torch.equal(getattr(prefix(large, 24), name), getattr(small, name)), name


@pytest.mark.parametrize("scores", [0.0, 1e-6], ids=["certain", "rounded above certain"])
def test_certain_tokens_keep_parents_first(scores):
    """Log-probabilities of 0: without care, parent and child would tie."""
    shape = TreeShape(4, 2, 3, (1, 1, 1, 1), 16)
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    top = torch.full((1, 1, 4, 1), scores)
    bucket = torch.zeros(1, 1, 4, dtype=torch.int64)
    starts = expansion.attach(None, top, torch.tensor([[[[5], [6], [7], [8]]]]), bucket)
    follow = torch.tensor([1, 2, 3, 4]).view(1, 1, 4, 1).expand(1, 3, 4, 1)
    tree = expansion.attach(starts, top.expand(1, 3, 4, 1), follow, bucket.expand(1, 3, 4))
    assert (tree.parent[0] < torch.arange(1, 17)).all()
    assert (tree.logprob[0] == 0).all()
    assert max(len(text) for text in texts(tree, 0)) == 8


def test_starts_that_have_no_room_are_left_out():
    shape = TreeShape(4, 2, 4, (2, 4, 6, 4), 60)
    draw = torch.Generator().manual_seed(0)
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    starts = expansion.attach(None, *random_block(draw, shape, 50, 1, 1))
    starts.valid[:] = False
    tree = expansion.attach(starts, *random_block(draw, shape, 50, 1, 4))
    assert max(len(text) for text in texts(tree, 0)) <= 4


def test_a_text_that_filled_a_shape_may_still_start():
    """Block 1 gives up at its second position; block 2 finds the same text, surer and open."""
    shape = TreeShape(3, 3, 8, (1, 0, 0, 0), 60)
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    chain = torch.tensor([[[[1], [2], [3]]]])
    top = torch.full((1, 1, 3, 1), -1.0)
    starts = expansion.attach(None, top, chain, torch.tensor([[[0, 3, 0]]]))
    assert starts.token[0, :2].tolist() == [3, 1] and starts.valid.sum() == 2
    # Below text 1: 2 once more, at −0.5 instead of −1.
    top = torch.full((1, 8, 3, 1), -0.5)
    token = torch.tensor([[4], [5], [6]]).expand(1, 8, 3, 1).clone()
    token[0, 1, 0] = 2
    starts = expansion.attach(starts, top, token, torch.zeros(1, 8, 3, dtype=torch.int64))
    again = (starts.token[0] == 2) & starts.valid[0]
    assert again.sum() == 1
    assert starts.row[0, again] == 2 and starts.position[0, again] == 0


def test_paths_too_long_for_a_key():
    with pytest.raises(ValueError, match="draft paths of 256 tokens, but at most 255"):
        TreeShape(32, 8, 8, (2, 4, 6, 4), 60)


def test_a_node_is_of_the_forward_whose_candidate_was_kept():
    """Block 1: 5 (or 6), then 7 (or 8). Block 2 starts after 5, 7 and after 5."""
    expansion = Expansion(TreeShape(2, 2, 2, (2, 2, 2, 2), 20), torch.tensor([2, 2, 2, 2]), 1)
    bucket = torch.zeros(1, 1, 2, dtype=torch.int64)
    starts = expansion.attach(
        None,
        torch.tensor([[[[0.6, 0.4], [0.5, 0.3]]]]).log(),
        torch.tensor([[[[5, 6], [7, 8]]]]),
        bucket,
    )
    assert starts.token.tolist() == [[7, 5]]
    expansion.attach(
        starts,
        torch.tensor([[[[0.9, 0.1], [0.8, 0.2]], [[0.7, 0.2], [0.6, 0.4]]]]).log(),
        # After 5, block 2 says 7 more surely than block 1 did, and 8 less surely.
        torch.tensor([[[[1, 2], [3, 4]], [[7, 8], [9, 10]]]]),
        bucket.expand(1, 2, 2),
    )
    tree, blocks = expansion.select(), expansion.blocks()[0].tolist()
    found = dict(zip(texts(tree, 0), blocks))
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
    assert blocks[int(tree.size[0]) :] == [0] * 10
