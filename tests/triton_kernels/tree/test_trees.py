"""Trees are merged in one launch, or by the loop for CPUs, and stored in one, as by torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tensors import assert_equal, column, on, wide
from support.trees import to_tree

from vllm_specblock.combine import merge
from vllm_specblock.engine.runner.tree_states import TreeStates, store_trees
from vllm_specblock.tree import DraftTree

from ..random_trees import random_trees


def slices(tree: DraftTree, device: torch.device) -> DraftTree:
    """The tree, its tensors as slices of larger ones; depths of slots not in use are garbage."""
    tree = replace(tree, depth=torch.where(tree.parent >= 0, tree.depth, 99))
    tensors = (getattr(tree, name) for name in DraftTree.TENSORS)
    return on(device, DraftTree(*(wide(x, 7) if x.dim() > 1 else x for x in tensors)))


@pytest.mark.parametrize("how", ["disjoint", "trie"])
@pytest.mark.parametrize(
    ("count", "ours", "theirs"), [(0, 5, 5), (5, 1, 1), (3, 60, 60), (3, 7, 40), (2, 256, 256)]
)
def test_merges_as_torch(forms, count, ours, theirs, how):
    launch = forms.load("merge_trees").merge_trees_triton
    first, second = random_trees(count, ours, 2), random_trees(count, theirs, 2, seed=theirs + 1)
    depth = max(int(x.depth[x.parent >= 0].max()) for x in (first, second)) if count else 1
    for budget in sorted({min(ours + 3, 256), min(ours + theirs, 256)}):
        wanted, agreed = merge(first, second, how, budget, depth)
        both = (slices(tree, forms.device) for tree in (first, second))
        made, origin, same = launch(*both, how == "trie", budget, depth)
        assert_equal(made, wanted)
        assert_equal((origin, same), (wanted.origin, agreed))
    if count > 2 and ours > 7:
        assert set(wanted.origin.flatten().tolist()) >= {0, 1, 2}
        assert how == "disjoint" or (wanted.origin == 3).any(), "nothing was joined"


# ---- Stored whole, as their best paths, or empty ----
def assert_same(kernels, tree: DraftTree, chain=None, paused=None, given=None) -> torch.Tensor:
    """Store by the kernel, of `given`, and by torch -> tokens; `paused` is of requests."""
    count, nodes = tree.token.shape
    slots = torch.randperm(count + 3, generator=torch.Generator().manual_seed(nodes))[:count]
    by_slot = None if paused is None else torch.ones(count + 3, dtype=torch.bool)
    if paused is not None:
        by_slot[slots] = paused

    def by_kernel(states, slots, *rest):
        tree, chain, paused, tokens = on(kernels.device, rest)
        chain = chain if chain is None else column(chain)
        launch = kernels.load("store_tree").store_trees_triton
        return launch(column(slots.to(kernels.device)), tree, states.trees, chain, paused, tokens)

    def by_torch(states, slots, tree, *rest):
        return store_trees(slots, tree, states.trees, *rest)

    found = []
    for store, device, of in ((by_torch, "cpu", tree), (by_kernel, kernels.device, given or tree)):
        states = TreeStates(count + 3, nodes, 5, device)
        for field in states.trees:  # slots hold garbage
            field.fill_(7)
        states.depth[:, 0] = 0
        tokens = store(states, slots, of, chain, by_slot, torch.full((count, nodes), -5))
        found.append([tokens, *states.trees])
    assert_equal(*found)
    return tokens


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"), [(0, 70), (1, 12), (5, 1), (9, 7), (3, 63), (3, 64), (2, 256)]
)
@pytest.mark.parametrize("who", ["all", "some", "none"])
def test_stores_as_torch(kernels, num_requests, num_nodes, who):
    # None falls so far that the end of a path would round to nothing.
    tree = random_trees(num_requests, num_nodes, fall=12 / (num_nodes + 8))
    origin = torch.where(tree.parent >= 0, tree.token % 3 + 1, 0)
    tree = replace(tree, origin=origin.to(torch.uint8))
    chain = torch.arange(num_requests) % 2 == 0
    chain = {"all": torch.ones_like(chain), "some": chain, "none": torch.zeros_like(chain)}[who]
    # Slots not in use of a request that becomes a chain are not read.
    fields = {name: x.clone() for name, x in vars(tree).items()}
    unused = chain[:, None] & (fields["parent"] < 0)
    garbage = {"token": 1 << 40, "depth": 1 << 30, "logprob": float("nan"), "origin": 255}
    for name, value in garbage.items():
        fields[name][unused] = value
    fields["logprob"][2:3][unused[2:3]] = 9.0  # worth more than all that counts
    fields["ancestors"][:, 1:][unused] = -1
    given = DraftTree(**fields)
    assert_same(kernels, tree, chain, given=given)
    assert_same(kernels, tree, 2 * chain.long(), given=given)  # as a graph has them
    for flags in (None, chain):
        assert_same(kernels, tree, flags, torch.arange(num_requests) % 3 == 2)
        assert_same(kernels, replace(tree, origin=None), flags)


@pytest.mark.parametrize("num_nodes", [63, 64, 256])
def test_words_at_their_edges(kernels, num_nodes):
    """Chains set every bit, the sign bits among them; one ends before its slots do."""
    chains = [[(up, up) for up in range(size)] for size in (num_nodes, num_nodes - 5)]
    tree = to_tree(chains, num_nodes)
    tree = replace(tree, logprob=tree.logprob / 100)
    assert_same(kernels, tree, torch.tensor([True, True]))
    assert tree.chains_where(torch.ones(2)).size.tolist() == [num_nodes, num_nodes - 5]


def test_the_first_of_equals(kernels):
    """Two leaves of depth 3, 6 and 7, and everything certain: the first of them is the end."""
    tree = to_tree([list(zip([0, 0, 1, 2, 1, 3, 4], range(7)))], 9)
    tree = replace(tree, logprob=torch.where(tree.parent >= 0, 0.0, tree.logprob))
    tokens = assert_same(kernels, tree, torch.tensor([True]))
    assert tokens[0, :3].tolist() == [0, 2, 5]
