"""Trees of fixed shape against every path there is."""

from __future__ import annotations

import math

import pytest
import torch
from baselines.static_tree import TreePlan, static_tree
from support.trees import best_paths, texts


def paths_of(parents: list[int], ranks: list[int]) -> list[tuple[int, ...]]:
    known = [()]
    for parent, rank in zip(parents, ranks):
        known.append((*known[parent], rank))
    return known[1:]


@pytest.mark.parametrize("budget", [1, 7, 20, 200])
def test_static_tree_expects_the_longest_accepted_path(budget):
    # Not in the order of the ranks, as rates from few samples come out; one rank never hits.
    hit = torch.tensor([[0.5, 0.1, 0.2], [0.4, 0.0, 0.3], [0.1, 0.3, 0.05]])
    parents, ranks = static_tree(hit, budget)
    found = paths_of(parents, ranks)
    chances = best_paths(hit.double().log().tolist())
    reachable = sorted((c for c in chances.values() if c > -math.inf), reverse=True)
    assert len(set(found)) == len(found)
    assert [chances[path] for path in found] == pytest.approx(reachable[:budget])


def test_what_hangs_from_nothing_is_left_out():
    plan = TreePlan([0, 1, 0, 3], [0, 0, 1, 0], 1)
    logprob = torch.tensor([[-1.0, -1.0, -math.inf, -1.0]])
    tree = plan.tree(torch.arange(4)[None], logprob, 4)
    assert texts(tree, 0) == {(0,): -1.0, (0, 1): -2.0}
