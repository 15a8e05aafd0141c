"""EAGLE-2's growth against the same in plain Python, over random log-probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import texts
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.drafters.eagle3.growth import level_shape
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.drafters.specblock.growth import Expansion, expansion


def levels_of(*sizes: int) -> Expansion:
    shape = TreeShape.levels(*sizes)
    return Expansion(shape, torch.tensor(shape.branching), 1)


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
        found = texts(grown, request)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, abs=1e-5)
        size = int(grown.size[request])
        assert (grown.parent[request, :size] <= torch.arange(size)).all()


def test_of_equal_scores_the_earlier_candidates_grow():
    levels, token = levels_of(2, 20, 3, 40), torch.arange(20)
    rows = levels.attach(None, torch.full((1, 1, 1, 20), -1.0), token[None, None, None])
    assert rows.node.tolist() == [[1, 2, 3]]


def test_what_does_not_grow_has_no_children():
    levels, both = levels_of(3, 2, 2, 20), torch.arange(2).expand(1, 2, 1, 2)
    rows = levels.attach(None, torch.tensor([[[[-0.1, -0.2]]]]), both[:, :1])
    rows = rows._replace(valid=torch.tensor([[True, False]]))
    rows = levels.attach(rows, both * 0.0, both)
    tree = levels.attach(rows, both * 0.0, both)
    assert all(path[0] == 0 for path in texts(tree, 0) if len(path) > 1)
    assert int(tree.size[0]) == 2 + 2 + 4


@pytest.mark.parametrize(
    ("depth", "top_k", "lookahead", "width"),
    [(8, 10, 60, 8), (8, 10, 100, 10), (8, 10, 3, 1), (1, 10, 4, 4), (3, 32, 100, 20)],
)
def test_width_is_what_slots_and_vocabulary_hold(depth, top_k, lookahead, width):
    options = Eagle3Config(depth=depth, top_k=top_k)
    assert level_shape(options, 60, lookahead, draft_vocab_size=20).num_starts == width


def test_a_certain_token_scores_no_more_than_its_parent():
    levels, token = levels_of(2, 1, 1, 4), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    rows = levels.attach(None, torch.full((1, 1, 1, 1), 1e-7), token)
    tree = levels.attach(rows, torch.full((1, 1, 1, 1), 1e-7), token)
    assert tree.logprob[0, :2].tolist() == [0.0, 0.0] and tree.parent[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize(("nodes", "depth"), [(60, 8), (32, 8), (24, 6), (12, 3), (8, 2), (1, 1)])
def test_small_trees_are_shallow_by_default(nodes, depth):
    assert level_shape(Eagle3Config(), nodes, nodes, 100).num_blocks == depth
    shape = level_shape(Eagle3Config(depth=5), nodes, nodes, 100)
    assert shape.num_blocks == min(5, nodes)
