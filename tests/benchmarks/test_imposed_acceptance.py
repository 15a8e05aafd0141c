"""The tree of an imposed acceptance: its probabilities, and that it is a SpecBlock tree."""

from __future__ import annotations

import pytest
import torch
from lib.acceptance import candidate_probabilities, synthetic_tree
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

BEST = [0.8, 0.7, 0.6, 0.5, 0.75, 0.6, 0.5, 0.4]


def shape_of(nodes, blocks=2, branching=(4, 8, 16, 16)):
    return TreeShape(4, blocks, 8, branching, nodes)


@pytest.mark.parametrize("best", [0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
def test_candidates_share_all_of_it_and_none_passes_the_one_before(best):
    found = candidate_probabilities(torch.tensor(best), 4000)
    assert found[0] == pytest.approx(best)
    assert (found[1:] <= found[:-1]).all()
    # Of a best candidate that has nothing, no other can have more.
    assert found.sum().item() == pytest.approx(1.0 if best else 0.0, abs=1e-4)


def test_a_node_scores_what_its_path_is_worth():
    tree = synthetic_tree(shape_of(60), BEST)
    assert tree.size.item() == 60
    first = 0
    for node in range(60):
        depth, parent = int(tree.depth[0, node]), int(tree.parent[0, node])
        above = tree.logprob[0, parent - 1] if parent else torch.tensor(0.0)
        of_depth = candidate_probabilities(torch.tensor(BEST[depth - 1]), 16)
        earlier = int((tree.parent[0, :node] == parent).sum())
        assert (tree.logprob[0, node] - above).exp().item() == pytest.approx(
            of_depth[earlier].item(), rel=1e-4
        )
        first += earlier == 0
    assert first > 8, "the tree has more than one chain"
    assert int(tree.depth.max()) == 8
