"""Two trees are merged in one launch, as by the loop for CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tensors import assert_equal, on, wide

from vllm_specblock.combine.merge import merge
from vllm_specblock.tree import DraftTree

from ..random_trees import random_trees

FIELDS = DraftTree.TENSORS


def slices(tree: DraftTree, device: torch.device) -> DraftTree:
    """The tree, its tensors as slices of larger ones; depths of slots not in use are garbage."""
    tree = replace(tree, depth=torch.where(tree.parent >= 0, tree.depth, 99))
    tensors = (getattr(tree, name) for name in FIELDS)
    return on(device, DraftTree(*(wide(x, 7) if x.dim() > 1 else x for x in tensors)))


@pytest.mark.parametrize("how", ["disjoint", "trie"])
@pytest.mark.parametrize(
    ("count", "ours", "theirs"), [(0, 5, 5), (5, 1, 1), (3, 60, 60), (3, 7, 40), (2, 256, 256)]
)
def test_merges_as_the_loop(kernels, count, ours, theirs, how):
    launch = kernels.load("merge_trees").merge_trees_triton
    first, second = random_trees(count, ours, 2), random_trees(count, theirs, 2, seed=theirs + 1)
    depth = max(int(x.depth[x.parent >= 0].max()) for x in (first, second)) if count else 1
    for budget in sorted({min(ours + 3, 256), min(ours + theirs, 256)}):
        wanted, agreed = merge(first, second, how, budget, depth)
        both = (slices(tree, kernels.device) for tree in (first, second))
        made, origin, same = launch(*both, how == "trie", budget, depth)
        assert_equal(*([getattr(x, name) for name in FIELDS] for x in (made, wanted)))
        assert_equal((origin, same), (wanted.origin, agreed))
    if count > 2 and ours > 7:
        assert set(wanted.origin.flatten().tolist()) >= {0, 1, 2}
        assert how == "disjoint" or (wanted.origin == 3).any(), "nothing was joined"
