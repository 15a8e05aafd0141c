"""Expansion on the device against plain Python, and its invariants."""

from __future__ import annotations

import pytest
import torch
from support.naive_expand import NaiveExpansion
from support.trees import texts
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_specblock.draft.expand import Expansion, Shape

BRANCHINGS = [(2, 4, 10, 0), (2, 4, 6, 4), (1, 1, 1, 1), (3, 0, 0, 0)]


def random_block(draw, shape, vocab, *rows):
    """Top log-probabilities [..., K, B], distinct tokens and buckets, as a drafter gives them."""
    full = (2.0 * torch.randn(*rows, shape.block_size, vocab, generator=draw)).log_softmax(-1)
    top, token = full.topk(shape.width, dim=-1)
    bucket = torch.randint(0, 4, (*rows, shape.block_size), generator=draw)
    return top, token, bucket


def expand_both(shape: Shape, vocab: int, seed: int, num_requests: int = 2):
    draw = torch.Generator().manual_seed(seed)
    expansion = Expansion(shape, torch.tensor(shape.branching), num_requests)
    naive = [NaiveExpansion(shape) for _ in range(num_requests)]
    block = random_block(draw, shape, vocab, num_requests)
    expansion.first_block(*block)
    for request, plain in enumerate(naive):
        plain.attach((), 0.0, *(part[request].tolist() for part in block))
    ends = [plain.chain_end for plain in naive]
    for m in range(2, shape.num_blocks + 1):
        starts = expansion.starts(m)
        block = random_block(draw, shape, vocab, num_requests, shape.num_starts)
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


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("vocab", [12, 60])
def test_equal_to_plain_python(branching, blocks, vocab):
    for seed in range(6):
        shape = Shape(4, blocks, 5, branching, [7, 24, 60, 200][seed % 4])
        tree, expected = expand_both(shape, vocab, seed)
        for request, plain in enumerate(expected):
            found = texts(tree, request)
            assert len(found) == int(tree.size[request]), "equal texts were joined"
            assert found.keys() == plain.keys()
            for text, score in plain.items():
                assert found[text] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_order(blocks):
    """Descending scores, parents first and above their children, unused slots last."""
    tree, _ = expand_both(Shape(4, blocks, 6, (2, 4, 6, 4), 40), 30, seed=9, num_requests=5)
    for request in range(5):
        size = int(tree.size[request])
        scores = tree.logprob[request, :size]
        assert (scores[1:] <= scores[:-1]).all()
        for node, up in enumerate(tree.parent[request, :size].tolist(), 1):
            assert up < node
            assert up == 0 or tree.logprob[request, up - 1] > tree.logprob[request, node - 1]
        assert (tree.parent[request, size:] == -1).all()
        assert torch.isneginf(tree.logprob[request, size:]).all()


def test_certain_tokens_keep_parents_first():
    """Log-probabilities of exactly 0: without care, parent and child would tie."""
    shape = Shape(4, 2, 3, (1, 1, 1, 1), 16)
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    zeros = torch.zeros(1, 4, 1)
    bucket = torch.zeros(1, 4, dtype=torch.int64)
    expansion.first_block(zeros, torch.tensor([[[5], [6], [7], [8]]]), bucket)
    starts = expansion.starts(2)
    follow = torch.tensor([1, 2, 3, 4]).view(1, 1, 4, 1).expand(1, 3, 4, 1)
    expansion.next_block(
        starts, 2, zeros[:, None].expand(1, 3, 4, 1), follow, bucket[:, None].expand(1, 3, 4)
    )
    tree = expansion.finish()
    assert (tree.parent[0] < torch.arange(1, 17)).all()
    assert max(len(text) for text in texts(tree, 0)) == 8


def test_starts_that_have_no_room_are_left_out():
    shape = Shape(4, 2, 4, (2, 4, 6, 4), 60)
    draw = torch.Generator().manual_seed(0)
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    expansion.first_block(*random_block(draw, shape, 50, 1))
    starts = expansion.starts(2)
    starts.valid[:] = False
    expansion.next_block(starts, 2, *random_block(draw, shape, 50, 1, 4))
    assert max(len(text) for text in texts(expansion.finish(), 0)) <= 4


def test_nothing_is_read_on_the_host():
    """A fake tensor has no value: any `.item()`, `if tensor` or data-dependent shape raises."""
    shape = Shape(4, 3, 8, (2, 4, 10, 0), 60)
    with FakeTensorMode():
        expansion = Expansion(shape, torch.zeros(4, dtype=torch.int64), 3)

        def block(*rows):
            full = (*rows, shape.block_size, shape.width)
            return (
                torch.zeros(full),
                torch.zeros(full, dtype=torch.int64),
                torch.zeros(full[:-1], dtype=torch.int64),
            )

        expansion.first_block(*block(3))
        for m in (2, 3):
            expansion.next_block(expansion.starts(m), m, *block(3, 8))
        tree = expansion.finish()
        tree.best_chain()
    assert tree.token.shape == (3, 60)
