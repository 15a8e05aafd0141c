"""Trees grown on the device: as in plain Python, and valid with any scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.committed import rows_of
from support.drafted_blocks import coarse_block, random_block
from support.lone_drafters import PAGE, head_of
from support.trees import best_paths, texts
from torch import nn
from vllm_specblock.triton_kernels.drafting.expand import TreeShape
from vllm_specblock.triton_kernels.drafting.expand_numba import CompiledGrowing
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import DraftLogits, lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import lm_and_rank_head_numba
from vllm_specblock.triton_kernels.optional_numba import AVAILABLE
from vllm_specblock.triton_kernels.tree.node_bits import unpack_bits

from vllm_specblock.drafters.eagle3.drafter import level_shape
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.drafters.specblock.growth import Expansion, expansion
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.tree import DraftTree

SHAPES = st.builds(
    TreeShape,
    block_size=st.integers(1, 5),
    num_blocks=st.integers(1, 4),
    num_starts=st.integers(1, 9),
    branching=st.sampled_from([(2, 4, 10, 0), (2, 4, 6, 4), (1, 1, 1, 1), (3, 0, 0, 0)]),
    budget=st.integers(1, 120),
)


class NaiveExpansion:
    """Candidates as a list; equal texts are joined level by level over a dictionary."""

    def __init__(self, shape):
        self.shape = shape
        self.nodes = []  # (text, score, row, position, may start)
        self.rows = 0
        self.used = set()

    def attach(self, text: tuple, score: float, logprob, token, bucket) -> None:
        """One caterpillar below a node of `text` and `score`: logprob, token [K][B], bucket [K]."""
        for k, (scores, tokens) in enumerate(zip(logprob, token)):
            width = self.shape.branching[bucket[k]]
            for b in range(self.shape.width):
                if b == 0 or b < width:
                    self.nodes.append(
                        ((*text, tokens[b]), score + scores[b], self.rows, k, width > 0)
                    )
                else:
                    self.nodes.append(None)
            text, score = (*text, tokens[0]), score + scores[0]
        self.rows += 1
        self.chain_end = len(self.nodes) - self.shape.width

    def skip(self) -> None:
        """A row that does not exist, for the numbering's sake."""
        self.nodes += [None] * (self.shape.block_size * self.shape.width)
        self.rows += 1

    def _joined(self) -> list[int]:
        """Indices into `nodes` from best to worst, the best one per text."""
        ranked = [i for i, node in enumerate(self.nodes) if node and node[1] > float("-inf")]
        ranked.sort(key=lambda i: (-self.nodes[i][1], len(self.nodes[i][0]), i))
        first: dict[tuple, int] = {}
        for index in ranked:
            first.setdefault(self.nodes[index][0], index)
        return list(first.values())

    def starts(self, chain_end: int) -> list[int]:
        """Indices into `nodes`, the chain's end first; no text starts twice."""
        free = [
            index
            for index in self._joined()
            if self.nodes[index][4] and self.nodes[index][0] not in self.used
        ]
        chosen = [chain_end, *(index for index in free if index != chain_end)]
        chosen = chosen[: self.shape.num_starts]
        self.used |= {self.nodes[index][0] for index in chosen}
        return chosen

    def finish(self) -> dict[tuple, float]:
        """The best N texts and their scores, in order."""
        return {self.nodes[i][0]: self.nodes[i][1] for i in self._joined()[: self.shape.budget]}


def expand_both(shape: TreeShape, vocab: int, seed: int, num_requests: int = 2, make=random_block):
    draw = torch.Generator().manual_seed(seed)
    growth = Expansion(shape, torch.tensor(shape.branching), num_requests)
    naive = [NaiveExpansion(shape) for _ in range(num_requests)]
    block = make(draw, shape, vocab, num_requests, 1)
    starts = growth.attach(None, *block)
    for request, plain in enumerate(naive):
        plain.attach((), 0.0, *(part[request, 0].tolist() for part in block))
    ends = [plain.chain_end for plain in naive]
    for _ in range(shape.num_blocks - 1):
        block = make(draw, shape, vocab, num_requests, shape.num_starts)
        grown = growth.attach(starts, *block)
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
    return starts, growth.blocks(), naive


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
        assert torch.isneginf(scores[size:]).all() and (tree.token[request, size:] == 0).all()
        assert len(texts(tree, request)) == size, "siblings of one text"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(SHAPES, st.sampled_from([11, 60]), st.integers(0, 10**6))
@pytest.mark.parametrize("make", [random_block, coarse_block], ids=["floats", "ties"])
def test_equal_to_plain_python(make, shape, vocab, seed):
    """Node by node: higher score, then lower depth, then the earlier candidate."""
    tree, block, naive = expand_both(shape, vocab, seed, make=make)
    for request, plain in enumerate(naive):
        found, expected = texts(tree, request), plain.finish()
        if make is coarse_block:
            assert list(found.items()) == list(expected.items())
            # A node is of the block whose candidate was kept.
            rows = [plain.nodes[index][2] for index in plain._joined()[: shape.budget]]
            wanted = [1 + -(-row // shape.num_starts) for row in rows]
            assert block[request].tolist() == wanted + [0] * (shape.budget - len(wanted))
        assert found == pytest.approx(expected, abs=1e-4)
    assert_valid(tree, vocab, shape.max_depth)


def test_paths_too_long_for_a_key():
    with pytest.raises(ValueError, match="draft paths of 256 tokens, but at most 255"):
        TreeShape(32, 8, 8, (2, 4, 6, 4), 60)


# ---- EAGLE-2 ----
def plain_growth(scores: list[torch.Tensor], shape: TreeShape, request: int) -> dict[tuple, float]:
    """Path of choices -> score. scores[d][r, row, k] are those of the rows of level d + 1."""
    level = {(k,): float(x) for k, x in enumerate(scores[0][request, 0])}
    found = dict(level)
    for each in scores[1:]:
        best = sorted(level.items(), key=lambda node: -node[1])[: shape.num_starts]
        level = {
            (*path, k): score + float(x)
            for row, (path, score) in enumerate(best)
            for k, x in enumerate(each[request, row])
        }
        found |= level
    return dict(sorted(found.items(), key=lambda node: -node[1])[: shape.budget])


@given(
    depth=st.integers(1, 5),
    top_k=st.integers(1, 4),
    budget=st.integers(1, 30),
    width=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=80)
@pytest.mark.parametrize("kind", [Expansion, expansion])
def test_levels_are_those_of_plain_python(kind, depth, top_k, budget, width, seed):
    shape = TreeShape.levels(depth, top_k, min(width, top_k), budget)
    draw = torch.Generator().manual_seed(seed)
    rows = [1] + [shape.num_starts] * (depth - 1)
    scores = [
        -torch.rand(2, count, 1, top_k, generator=draw).sort(descending=False, dim=-1).values
        for count in rows
    ]
    levels, grown = kind(shape, torch.tensor(shape.branching), 2), None
    for each in scores:
        grown = levels.attach(grown, each, torch.arange(top_k).expand_as(each))
    for request in range(2):
        wanted = plain_growth([each[:, :, 0] for each in scores], shape, request)
        assert texts(grown, request) == pytest.approx(wanted, abs=1e-5)
    assert_valid(grown, top_k, depth)


def test_of_equal_scores_the_earlier_candidates_grow():
    shape, token = TreeShape.levels(2, 20, 3, 40), torch.arange(20)
    levels = Expansion(shape, torch.tensor(shape.branching), 1)
    rows = levels.attach(None, torch.full((1, 1, 1, 20), -1.0), token[None, None, None])
    assert rows.node.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("depth", "top_k", "lookahead", "width"),
    [(8, 10, 60, 8), (8, 10, 100, 10), (8, 10, 3, 1), (1, 10, 4, 4), (3, 32, 100, 20)],
)
def test_width_is_what_slots_and_vocabulary_hold(depth, top_k, lookahead, width):
    options = Eagle3Config(depth=depth, top_k=top_k)
    assert level_shape(options, 60, lookahead, draft_vocab_size=20).num_starts == width


@pytest.mark.parametrize(("nodes", "depth"), [(60, 8), (32, 8), (24, 6), (12, 3), (8, 2), (1, 1)])
def test_small_trees_are_shallow_by_default(nodes, depth):
    assert level_shape(Eagle3Config(), nodes, nodes, 100).num_blocks == depth
    shape = level_shape(Eagle3Config(depth=5), nodes, nodes, 100)
    assert shape.num_blocks == min(5, nodes)


# ---- Best-first trees through a block of positions, against every path there is ----
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10**6), st.booleans()
)
def test_path_trees_are_the_best_of_all_paths(depth, width, budget, seed, in_pairs):
    draw = torch.Generator().manual_seed(seed)
    form = (2, depth, width, width) if in_pairs else (2, depth, width)
    logprob = torch.randn(form, generator=draw).mul(2).log_softmax(-1) - 0.01
    if not in_pairs:
        logprob = logprob.sort(descending=True).values
    token = torch.rand(2, depth, 50, generator=draw).argsort(-1)[..., :width]
    tree = PathTrees(depth, width, budget, "cpu", in_pairs).grow(logprob, token)
    for request in range(2):
        rows = logprob[request].double().tolist()

        def choices(path, rows=rows):
            row = rows[len(path)]
            return dict(enumerate(row[path[-1] if path else 0] if in_pairs else row))

        paths = best_paths(choices, depth)
        best = sorted(paths.values(), reverse=True)[:budget]
        assert int(tree.size[request]) == len(best) and tree.token.shape == (2, budget)
        assert tree.logprob[request, : len(best)].tolist() == pytest.approx(best, rel=1e-5)
        named = {
            tuple(token[request, k, rank].item() for k, rank in enumerate(ranks)): total
            for ranks, total in paths.items()
        }
        found = texts(tree, request)
        assert len(found) == len(best)
        for path, total in found.items():
            assert total == pytest.approx(named[path], rel=1e-5)
    assert_valid(tree, 50, depth)


def test_a_tie_goes_to_the_lower_depth():
    logprob, token = torch.tensor([[[0.0, -9.0]] * 2]), torch.tensor([[[4, 5]] * 2])
    tree = PathTrees(2, 2, 2, "cpu").grow(logprob, token)
    assert tree.token.tolist() == [[4, 4]] and tree.parent.tolist() == [[0, 1]]


# ---- Scores that are no numbers ----
# Finite weights may still give infinite logits, and verification follows any parents that a tree
# names. So a score of NaN or of minus infinity is no node, and plus infinity is certain.
NAN, INF = float("nan"), float("inf")
STRANGE = torch.tensor([NAN, -NAN, INF, -INF, 3e38, -3e38, 1.0, 0.0])
compiled = pytest.mark.skipif(not AVAILABLE, reason="compiled loops need Numba")


KINDS = [Expansion, pytest.param(CompiledGrowing, marks=compiled)]


def strange(draw, scores: torch.Tensor, share: float) -> torch.Tensor:
    """Scores, of which a share is something else."""
    which = torch.randint(0, len(STRANGE), scores.shape, generator=draw)
    return torch.where(torch.rand(scores.shape, generator=draw) < share, STRANGE[which], scores)


def grow(kind, shape: TreeShape, vocab: int, seed: int, share: float) -> DraftTree:
    """Trees of three requests."""
    draw, starts = torch.Generator().manual_seed(seed), None
    growth = kind(shape, torch.tensor(shape.branching), 3)
    for block in range(1, shape.num_blocks + 1):
        if starts is not None:  # a caller reads hidden states at all of them, valid or not
            assert ((starts.token >= 0) & (starts.token < vocab)).all()
            assert ((starts.row >= 0) & (starts.row < 1 + (block - 2) * shape.num_starts)).all()
            assert ((starts.position >= 0) & (starts.position < shape.block_size)).all()
        rows = 1 if starts is None else shape.num_starts
        top, *said = random_block(draw, shape, vocab, 3, rows)
        starts = growth.attach(starts, strange(draw, top, share), *said)
    return starts


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(0, 10**6), st.sampled_from([0.02, 0.2, 0.6, 1.0]))
@example(TreeShape(4, 3, 5, (2, 4, 6, 4), 60), 0, 1.0)
@pytest.mark.parametrize("kind", KINDS)
def test_growth(kind, shape, seed, share):
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
        draw = torch.Generator().manual_seed(seed)
        logits = strange(draw, 3 * torch.randn(3, 2, vocab, generator=draw), share)
        if fill is not None:
            logits[0] = fill
        normed = torch.full((3, 2, size), NAN, dtype=dtype)
        given = DraftLogits(normed, logits.to(dtype), offset, head, width, scope, beta)
        logprob, token, bucket = read(given)
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
