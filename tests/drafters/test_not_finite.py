"""Trees from scores that are no numbers are trees, and the target can judge them.

Finite weights may still give infinite logits, and verification follows any parents that a
tree names. So a score of NaN or of minus infinity is no node, plus infinity is certain, and what is
left has parents before children and tokens of the vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.committed import rows_of
from support.drafted_blocks import random_block
from support.lone_drafters import PAGE, head_of
from support.trees import texts
from torch import nn
from vllm_specblock.triton_kernels.drafting.expand import TreeShape
from vllm_specblock.triton_kernels.drafting.expand_numba import CompiledGrowing
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import lm_and_rank_head_numba
from vllm_specblock.triton_kernels.optional_numba import AVAILABLE

from vllm_specblock.candidates import select
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.tree import DraftTree, unpack_bits

NAN, INF = float("nan"), float("inf")
STRANGE = torch.tensor([NAN, -NAN, INF, -INF, 3e38, -3e38, 1.0, 0.0])
BRANCHINGS = [(2, 4, 10, 0), (2, 4, 6, 4), (1, 1, 1, 1), (3, 0, 0, 0)]
compiled = pytest.mark.skipif(not AVAILABLE, reason="compiled loops need Numba")


class PlainExpansion(Expansion):
    """Differs in that torch also selects where a compiled loop could."""

    def select(self) -> DraftTree:
        fields = (field[:, : self.count] for field in self.fields)
        token, path_hash, key, parent = fields
        score = self.score[:, : self.count]
        depth = self.shape.max_depth
        return select.reference(token, parent, score, key, path_hash, self.shape.budget, depth)


KINDS = [PlainExpansion, Expansion, pytest.param(CompiledGrowing, marks=compiled)]


def assert_valid(tree: DraftTree, vocab: int, max_depth: int) -> None:
    """All that verification takes for granted of R trees of N slots."""
    requests, slots = tree.token.shape
    assert ((tree.token >= 0) & (tree.token < vocab)).all()
    assert ((tree.size >= 0) & (tree.size <= slots)).all()
    assert not tree.logprob.isnan().any()
    sees = unpack_bits(tree.ancestors, slots + 1).tolist()
    for request in range(requests):
        size, depth, path = int(tree.size[request]), [0], [{0}]
        for node, up in enumerate(tree.parent[request].tolist(), 1):
            assert (0 <= up < node) if node <= size else up == -1
            up = max(up, 0)  # slots not in use hang from the root
            depth.append(depth[up] + 1)
            path.append(path[up] | {node})
        assert tree.depth[request].tolist() == depth[1:] and max(depth) <= max_depth
        assert [{at for at, bit in enumerate(row) if bit} for row in sees[request]] == path
        scores = tree.logprob[request]
        assert scores[:size].isfinite().all() and (scores[:size] <= 0).all()
        assert (scores[:size].diff() <= 0).all()
        assert torch.isneginf(scores[size:]).all()
        assert len(texts(tree, request)) == size, "siblings of one text"


def strange_block(draw, share, shape, vocab, *rows):
    """A random block in which a share of the scores is something else."""
    top, token, bucket = random_block(draw, shape, vocab, *rows)
    which = torch.randint(0, len(STRANGE), top.shape, generator=draw)
    strange = torch.rand(top.shape, generator=draw) < share
    return torch.where(strange, STRANGE[which], top), token, bucket


def grow(
    kind, shape: TreeShape, vocab: int, seed: int, share: float, requests: int = 3
) -> DraftTree:
    draw = torch.Generator().manual_seed(seed)
    growth = kind(shape, torch.tensor(shape.branching), requests)
    starts = growth.attach(None, *strange_block(draw, share, shape, vocab, requests, 1))
    for block in range(2, shape.num_blocks + 1):
        assert ((starts.token >= 0) & (starts.token < vocab)).all()
        assert ((starts.row >= 0) & (starts.row < 1 + (block - 2) * shape.num_starts)).all()
        assert ((starts.position >= 0) & (starts.position < shape.block_size)).all()
        rows = (requests, shape.num_starts)
        starts = growth.attach(starts, *strange_block(draw, share, shape, vocab, *rows))
    return starts


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(BRANCHINGS),
    st.integers(1, 120),
    st.integers(0, 10**6),
    st.sampled_from([0.02, 0.2, 0.6, 1.0]),
)
@example(4, 3, 5, (2, 4, 6, 4), 60, 0, 1.0)
@pytest.mark.parametrize("kind", KINDS)
def test_growth(kind, block_size, blocks, starts, branching, budget, seed, share):
    shape = TreeShape(block_size, blocks, starts, branching, budget)
    assert_valid(grow(kind, shape, 30, seed, share), 30, shape.max_depth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", [NAN, -NAN, -INF])
def test_no_number_is_no_node(kind, score):
    """Nor is anything below it, though its own score be fine."""
    shape = TreeShape(3, 1, 1, (2, 2, 2, 2), 8)
    growth = kind(shape, torch.tensor(shape.branching), 1)
    top = torch.tensor([[[[-0.1, -2.0], [score, -1.0], [-0.2, -3.0]]]])
    bucket = torch.zeros(1, 1, 3, dtype=torch.int64)
    tree = growth.attach(None, top, torch.arange(6).view(1, 1, 3, 2), bucket)
    assert texts(tree, 0).keys() == {(0,), (0, 3), (1,)}


def strange_logits(seed: int, share: float, rows: int, vocab: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, 2, vocab, generator=draw)
    which = torch.randint(0, len(STRANGE), logits.shape, generator=draw)
    strange = torch.rand(logits.shape, generator=draw) < share
    return torch.where(strange, STRANGE[which], logits)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(10, 1500),
    st.integers(1, 10),
    st.sampled_from([None, 10, 20]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from([0.001, 0.1, 1.0]),
)
@example(1100, 10, 20, torch.float32, False, 0, 0.0)
@pytest.mark.parametrize(
    "read",
    [lm_and_rank_head.reference, pytest.param(lm_and_rank_head_numba, marks=compiled)],
    ids=["torch", "compiled"],
)
@torch.no_grad()
def test_reading_the_heads(read, vocab, width, scope, dtype, sharp, seed, share):
    """Tokens are the vocabulary's and buckets are buckets for any scores."""
    classes, size = 4, 8
    head = nn.Sequential(
        nn.Linear(size + 15, 6, bias=False), nn.SiLU(), nn.Linear(6, classes, bias=False)
    ).to(dtype)
    offset = torch.arange(vocab)
    beta = torch.tensor([0.5, 3.0, 1.0]) if sharp else None
    for fill in (None, *STRANGE):
        logits = strange_logits(seed, share, 3, vocab)
        if fill is not None:
            logits[0] = fill
        logprob, token, bucket = read(
            torch.full((3, 2, size), NAN, dtype=dtype),
            logits.to(dtype),
            offset,
            head,
            width,
            scope,
            beta,
        )
        assert logprob.shape == token.shape == (3, 2, width)
        assert ((token >= 0) & (token <= 2 * (vocab - 1)) & (token % 2 == 0)).all()
        assert ((bucket >= 0) & (bucket < classes)).all()


@pytest.mark.parametrize("std", [1e4, 1e19, 3e37])
@pytest.mark.parametrize("prefix", ["", "lm_head", "rank_head", "layers.0", "input_layer"])
@torch.no_grad()
def test_a_head_of_huge_weights(prefix, std):
    """All weights are finite; what comes of them is not, and stays in the cache."""
    head, width = head_of("specblock")
    draw = torch.Generator().manual_seed(0)
    for name, weight in head.model.named_parameters():
        if name.startswith(prefix):
            weight.copy_(std * torch.randn(weight.shape, generator=draw))
    states, text = torch.randn(3, 3, 40, width), torch.randint(0, 2048, (3, 40))
    tables = torch.arange(15).view(3, 5)
    for end in (9, 12):
        rows = rows_of([(end - 3, end)] * 3, tables, states, text, PAGE)
        head.advance(rows)
        assert_valid(head.draft(), 2048, head.max_depth)
