"""One launch makes the chains that torch makes of best paths, and leaves the other trees alone."""

from __future__ import annotations

import pytest
import torch
from support.trees import to_tree

from vllm_specblock.combine.combined import Combined
from vllm_specblock.tree import DraftTree

NAMES = (*DraftTree.__dataclass_fields__, "origin")
GARBAGE = {
    torch.int64: 1 << 40,
    torch.int32: 1 << 30,
    torch.float32: float("nan"),
    torch.uint8: 255,
    torch.bool: True,
}


def grown(parents: list[list[int]], num_nodes: int, fall: float, seed: int = 0) -> Combined:
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
    return Combined(tree, torch.where(tree.parent >= 0, origin, 0).to(torch.uint8))


def random_trees(num_requests: int, num_nodes: int) -> Combined:
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


def fields_of(combined: Combined) -> dict[str, torch.Tensor]:
    return vars(combined.tree) | {"origin": combined.origin}


def in_a_table(x: torch.Tensor) -> torch.Tensor:
    """The same values as a column, or a slice, of something larger that is full of garbage."""
    inner = x.shape[1:] or (1,)
    table = x.new_full((len(x), *(count + 3 for count in inner)), GARBAGE[x.dtype])
    for axis, count in enumerate(inner, 1):
        table = table.narrow(axis, 1, count)
    return (table if x.dim() > 1 else table[:, 0]).copy_(x)


def launch(kernels, chain: torch.Tensor, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given = {name: in_a_table(x.to(kernels.device)) for name, x in given.items()}
    before = {name: x.clone() for name, x in given.items()}
    chain = in_a_table(chain.to(kernels.device))
    made = kernels.load("best_chain").best_chain_triton(chain, **given)
    for name, x in given.items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
    return {name: x.cpu() for name, x in zip(NAMES, made, strict=True)}


def assert_same(made: dict[str, torch.Tensor], wanted: Combined) -> None:
    for name, theirs in fields_of(wanted).items():
        assert made[name].dtype == theirs.dtype, name
        assert made[name].is_contiguous(), name
        assert torch.equal(made[name], theirs), name


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"), [(1, 12), (5, 1), (9, 7), (3, 63), (3, 64), (2, 256)]
)
@pytest.mark.parametrize("who", ["all", "some", "nobody"])
def test_as_torch(kernels, num_requests, num_nodes, who):
    combined = random_trees(num_requests, num_nodes)
    chain = torch.arange(num_requests) % 2 == 0
    chain = {"all": torch.ones_like(chain), "some": chain, "nobody": torch.zeros_like(chain)}[who]
    wanted = combined.where(chain)
    # Nobody may look at what a request that becomes a chain has in slots not in use.
    given = {name: x.clone() for name, x in fields_of(combined).items()}
    unused = chain[:, None] & (given["parent"] < 0)
    for name in ("token", "depth", "logprob", "origin"):
        given[name][unused] = GARBAGE[given[name].dtype]
    given["logprob"][2:3][unused[2:3]] = 9.0  # worth more than all that counts
    given["ancestors"][:, 1:][unused] = -1
    given["size"][chain] = GARBAGE[torch.int32]
    flags = 2 * chain.long()  # as a graph has them
    assert_same(launch(kernels, chain, given), wanted)
    assert_same(launch(kernels, flags, given), wanted)
    for name, x in fields_of(combined.where(flags)).items():
        assert torch.equal(x, fields_of(wanted)[name])
    if who != "nobody" and num_nodes > 1:
        assert wanted.tree.size[0] < num_nodes, "the first tree is a chain by itself"


@pytest.mark.parametrize("num_nodes", [62, 63, 64, 127, 128, 256])
def test_words_at_their_edges(kernels, num_nodes):
    """Chains set every bit, the sign bits among them; one ends before its slots do."""
    combined = grown([list(range(num_nodes)), list(range(num_nodes - 5))], num_nodes, 0.01)
    wanted = combined.where(torch.tensor([True, True]))
    assert wanted.tree.size.tolist() == [num_nodes, num_nodes - 5]
    assert_same(launch(kernels, torch.tensor([True, True]), fields_of(combined)), wanted)


def test_the_first_of_equals(kernels):
    """Two leaves of depth 3, 6 and 7, and everything certain: the first of them is the end."""
    combined = grown([[0, 0, 1, 2, 1, 3, 4]], 9, fall=0.0)
    made = launch(kernels, torch.tensor([True]), fields_of(combined))
    assert made["token"][0, :3].tolist() == combined.tree.token[0, [0, 2, 5]].tolist()
    assert_same(made, combined.where(torch.tensor([True])))


def test_no_nodes_and_no_requests(kernels):
    nothing = Combined.of(DraftTree.empty(2, 70, "cpu"), drafter=1)
    chain = torch.tensor([True, False])
    assert_same(launch(kernels, chain, fields_of(nothing)), nothing)
    nobody = Combined.of(DraftTree.empty(0, 70, "cpu"), drafter=1)
    assert_same(launch(kernels, chain[:0], fields_of(nobody)), nobody)
