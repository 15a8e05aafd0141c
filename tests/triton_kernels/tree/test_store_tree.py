"""One launch stores the trees that torch stores: whole, as their best paths, or empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tensors import assert_equal, column, on
from support.trees import to_tree

from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.tree import DraftTree

GARBAGE = {
    torch.int64: 1 << 40,
    torch.int32: 1 << 30,
    torch.float32: float("nan"),
    torch.uint8: 255,
    torch.bool: True,
}


def grown(parents: list[list[int]], num_nodes: int, fall: float, seed: int = 0) -> DraftTree:
    """Trees of these shapes; a score falls from parent to child by at most `fall` nats."""
    draw = torch.Generator().manual_seed(seed)
    plain = [
        [(up, int(torch.randint(1, 1000, (), generator=draw))) for up in tree] for tree in parents
    ]
    tree = to_tree(plain, num_nodes)
    for request, ups in enumerate(parents):
        score = [0.0]
        for up in ups:
            score.append(score[up] - fall * float(torch.rand((), generator=draw)))
        tree.logprob[request, : len(ups)] = torch.tensor(score[1:])
    origin = torch.randint(1, 4, tree.parent.shape, generator=draw)
    return replace(tree, origin=torch.where(tree.parent >= 0, origin, 0).to(torch.uint8))


def random_trees(num_requests: int, num_nodes: int) -> DraftTree:
    """Trees of all sizes, among them one that is empty and one that is full."""
    draw = torch.Generator().manual_seed(num_nodes)
    sizes = torch.randint(0, num_nodes + 1, (num_requests,), generator=draw).tolist()
    sizes[:3] = [num_nodes, 0, num_nodes // 2][:num_requests]
    parents = [
        [int(torch.randint(max(0, up - 4), up + 1, (), generator=draw)) for up in range(size)]
        for size in sizes
    ]
    # Paths of some N / 3 nodes: none falls so far that its end would round to nothing.
    return grown(parents, num_nodes, fall=12 / (num_nodes + 8), seed=num_nodes)


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

    found = []
    for store, device, of in (
        (TreeStates.store, "cpu", tree),
        (by_kernel, kernels.device, given or tree),
    ):
        states = TreeStates(count + 3, nodes, 5, device)
        for field in states.trees:  # slots hold garbage
            field.fill_(7)
        states.depth[:, 0] = 0
        tokens = store(states, slots, of, chain, by_slot, torch.full((count, nodes), -5))
        found.append([tokens, *states.trees])
    assert_equal(*found)
    return tokens


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"),
    [(0, 70), (1, 12), (5, 1), (9, 7), (3, 63), (3, 64), (2, 256)],
)
@pytest.mark.parametrize("who", ["all", "some", "none"])
def test_as_torch(kernels, num_requests, num_nodes, who):
    tree = random_trees(num_requests, num_nodes)
    chain = torch.arange(num_requests) % 2 == 0
    chain = {"all": torch.ones_like(chain), "some": chain, "none": torch.zeros_like(chain)}[who]
    # Slots not in use of a request that becomes a chain are not read.
    fields = {name: x.clone() for name, x in vars(tree).items()}
    unused = chain[:, None] & (fields["parent"] < 0)
    for name in ("token", "depth", "logprob", "origin"):
        fields[name][unused] = GARBAGE[fields[name].dtype]
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
    tree = grown([list(range(num_nodes)), list(range(num_nodes - 5))], num_nodes, 0.01)
    assert_same(kernels, tree, torch.tensor([True, True]))
    assert tree.chains_where(torch.ones(2)).size.tolist() == [num_nodes, num_nodes - 5]


def test_the_first_of_equals(kernels):
    """Two leaves of depth 3, 6 and 7, and everything certain: the first of them is the end."""
    tree = grown([[0, 0, 1, 2, 1, 3, 4]], 9, fall=0.0)
    tokens = assert_same(kernels, tree, torch.tensor([True]))
    assert tokens[0, :3].tolist() == tree.token[0, [0, 2, 5]].tolist()


def test_no_nodes(kernels):
    assert_same(kernels, DraftTree.empty(2, 70, "cpu"), torch.tensor([True, False]))
