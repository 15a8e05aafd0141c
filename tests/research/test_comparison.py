"""Trees of one width, for the ablation of rank-guided branching."""

from __future__ import annotations

import pytest
import torch
from comparison import uniform_shape
from support.records import HIDDEN, small_drafter
from support.trees import texts

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.learner import EvalSequence


@pytest.mark.parametrize(("blocks", "nodes"), [(2, 60), (3, 30), (1, 12)])
def test_a_uniform_tree_fills_its_budget_without_the_rank_head(blocks, nodes):
    drafter = small_drafter(0)
    embedding = torch.randn(drafter.config.vocab_size, HIDDEN)
    tokens, hidden = torch.randint(20, (40,)), torch.randn(40, 3 * HIDDEN)
    sequence = EvalSequence(tokens, 6, hidden, hidden[:, :HIDDEN], lambda ids: embedding[ids])
    shape = uniform_shape(serving_shape(drafter, SpecBlockConfig(num_blocks=blocks), nodes))
    assert len(set(shape.branching)) == 1 and shape.budget == nodes
    trees = []
    for favourite in range(4):
        with torch.no_grad():  # the rank head says the same bucket everywhere
            drafter.rank_head[2].weight.zero_()
            drafter.rank_head[2].weight[favourite] = 1.0
        trees.append(texts(draft_trees(drafter, sequence, shape)(12), 0))
    assert trees.count(trees[0]) == 4
    assert len(trees[0]) == nodes
