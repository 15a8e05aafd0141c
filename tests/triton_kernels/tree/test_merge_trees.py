"""Two trees are merged in one launch, and by the loop for CPUs, as by torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tensors import assert_equal, on, wide

from vllm_specblock.combine import merge
from vllm_specblock.tree import DraftTree

FIELDS = DraftTree.TENSORS


def trees(count: int, slots: int, vocab: int, seed: int) -> DraftTree:
    """Trees of all sizes, the first one full and the second one empty, with many ties and twins.

    Scores are multiples of 1/8, and what lies in slots not in use is garbage where it may be.
    """
    draw = torch.Generator().manual_seed(seed)
    size = torch.randint(0, slots + 1, (count,), generator=draw, dtype=torch.int32)
    size[:2] = torch.tensor([slots, 0])[:count]
    used = torch.arange(slots) < size[:, None]
    up = torch.arange(slots) - torch.randint(0, 6, (count, slots), generator=draw)
    token = torch.randint(vocab, (count, slots), generator=draw)
    fall = torch.randint(0, 2, (count, slots), generator=draw).cumsum(1) / -8
    tree = DraftTree.from_nodes(
        token,
        torch.where(used, up.clamp(min=0), -1).int(),
        torch.where(used, fall, float("-inf")),
        size,
    )
    return replace(tree, depth=torch.where(used, tree.depth, 99))


def slices(tree: DraftTree, device: torch.device) -> DraftTree:
    """The tree, its tensors as slices of larger ones."""
    tensors = (getattr(tree, name) for name in FIELDS)
    return on(device, DraftTree(*(wide(x, 7) if x.dim() > 1 else x for x in tensors)))


@pytest.mark.parametrize("how", ["disjoint", "trie"])
@pytest.mark.parametrize(
    ("count", "ours", "theirs"), [(0, 5, 5), (5, 1, 1), (3, 60, 60), (3, 7, 40), (2, 256, 256)]
)
def test_merges_as_torch(forms, count, ours, theirs, how):
    launch = forms.load("merge_trees").merge_trees_triton
    first, second = trees(count, ours, 2, ours), trees(count, theirs, 2, theirs + 1)
    depth = max(int(x.depth[x.parent >= 0].max()) for x in (first, second)) if count else 1
    for budget in sorted({min(ours + 3, 256), min(ours + theirs, 256)}):
        wanted, agreed = merge(first, second, how, budget, depth)
        both = (slices(tree, forms.device) for tree in (first, second))
        made, origin, same = launch(*both, how == "trie", budget, depth)
        assert_equal(*([getattr(x, name) for name in FIELDS] for x in (made, wanted)))
        assert_equal((origin, same), (wanted.origin, agreed))
    if count > 2 and ours > 7:
        assert set(wanted.origin.flatten().tolist()) >= {0, 1, 2}
        assert how == "disjoint" or (wanted.origin == 3).any(), "nothing was joined"
