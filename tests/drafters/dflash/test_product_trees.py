"""Best-first trees of independent positions against every path there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import best_paths, texts

from vllm_specblock.drafters.dflash.drafter import ProductTrees

from ..test_growth import assert_valid


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10**6))
def test_product_trees_are_the_best_of_best_paths(depth, width, budget, seed):
    draw = torch.Generator().manual_seed(seed)
    logprob = torch.randn(2, depth, width, generator=draw).mul(2).log_softmax(-1)
    logprob = logprob.sort(descending=True).values - 0.01
    token = torch.rand(2, depth, 50, generator=draw).argsort(-1)[..., :width]
    tree = ProductTrees(depth, width, budget, "cpu").grow(logprob, token)
    for request in range(2):
        paths = best_paths(logprob[request].double().tolist())
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
    tree = ProductTrees(2, 2, 2, "cpu").grow(logprob, token)
    assert tree.token.tolist() == [[4, 4]] and tree.parent.tolist() == [[0, 1]]
