"""One launch keeps of new trees what the torch description of it keeps."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.combine.combined import Combined
from vllm_specblock.engine.runner import tree_states as module
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.tree import DraftTree

KEPT = ("parent", "depth", "ancestors", "path", "accepted", "origin", "score")
DEPTH = 4


def some_trees(count: int, nodes: int, seed: int) -> Combined:
    """Trees of every size from none to all nodes, of two heads."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.randint(0, nodes + 1, (count,), generator=draw, dtype=torch.int32)
    used = torch.arange(nodes) < size[:, None]
    parent = (torch.rand(count, nodes, generator=draw) * torch.arange(1, nodes + 1)).int()
    score = torch.rand(count, nodes, generator=draw).neg().cumsum(1)
    tree = DraftTree.from_nodes(
        torch.randint(0, 99, (count, nodes), generator=draw),
        torch.where(used, parent, -1),
        torch.where(used, score, float("-inf")),
        size,
    )
    origin = torch.randint(1, 4, (count, nodes), generator=draw)
    return Combined(tree, torch.where(used, origin, 0).to(torch.uint8))


def apart(combined: Combined) -> Combined:
    """The same trees, none of their tensors contiguous; some have strides between entries."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], 1)[:, 0]

    fields = {name: wide(x) for name, x in vars(combined.tree).items()}
    fields["depth"] = torch.stack([fields["depth"]] * 2, -1)[..., 0]
    ancestors = torch.nn.functional.pad(combined.tree.ancestors, (0, 1, 0, 2), value=-1)
    fields["ancestors"] = ancestors[:, :-2, :-1]
    return Combined(DraftTree(**fields), combined.origin.t().contiguous().t())


def on(device: torch.device, combined: Combined) -> Combined:
    """As `apart` left it: `to` would lay strided tensors out anew."""

    def put(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    tree = DraftTree(**{name: put(x) for name, x in vars(combined.tree).items()})
    return Combined(tree, put(combined.origin))


@pytest.fixture
def both(kernels):
    """(number of slots, N) -> slots filled by torch, and slots that are to be by the kernel."""

    def make(count: int, nodes: int) -> tuple[TreeStates, TreeStates]:
        pair = (
            TreeStates(count, nodes, DEPTH, "cpu"),
            TreeStates(count, nodes, DEPTH, kernels.device),
        )
        for slots in pair:
            slots.accepted.fill_(3)
        return pair

    return make


def launch(kernels, kept: TreeStates, req_idx: torch.Tensor, combined: Combined) -> None:
    tree = combined.tree
    kernels.load("store_tree").store_tree_triton(
        req_idx,
        tree.parent,
        tree.depth,
        tree.ancestors,
        tree.logprob,
        combined.origin,
        kept.parent,
        kept.depth,
        kept.ancestors,
        kept.score,
        kept.origin,
        kept.accepted,
    )


@pytest.mark.parametrize("nodes", [1, 5, 60, 63, 64, 256])
@pytest.mark.parametrize("form", [lambda trees: trees, apart], ids=["plain", "apart"])
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=["eager", "graph"])
def test_as_torch_keeps(kernels, both, nodes, form, slot_type):
    theirs, mine = both(7, nodes)
    for seed, req_idx in enumerate([[4, 0, 6], [0, 5], [2]]):
        combined = some_trees(len(req_idx), nodes, seed)
        req_idx = torch.tensor(req_idx, dtype=slot_type)
        theirs.store(req_idx.long(), combined)
        column = torch.full((len(req_idx), 3), 1 << 30, dtype=slot_type)
        column[:, 0] = req_idx
        req_idx = column.to(kernels.device)[:, 0]
        launch(kernels, mine, req_idx, on(kernels.device, form(combined)))
    for name in KEPT:
        expected, found = getattr(theirs, name), getattr(mine, name)
        assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected), name
    assert theirs.accepted.tolist() == [0, 3, 0, 3, 0, 0, 0]
    assert (theirs.origin[[1, 3]] == 0).all() and (theirs.origin > 0).any()


def test_no_request(kernels, both):
    theirs, mine = both(2, 5)
    none = torch.zeros(0, dtype=torch.int64, device=kernels.device)
    launch(kernels, mine, none, on(kernels.device, some_trees(0, 5, 0)))
    for name in KEPT:
        assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name))


def test_the_slots_take_the_kernel_where_they_lie_on_a_gpu(monkeypatch):
    """Every field goes to its place: the launch is given what the tests above give it."""
    calls = []
    monkeypatch.setattr(module, "store_tree_triton", lambda *args: calls.append(args))
    slots, combined = TreeStates(3, 5, DEPTH, "cpu"), some_trees(1, 5, 0)
    tree, req_idx = combined.tree, torch.tensor([1])

    class OnGpu:
        is_cuda = True

    slots.parent = OnGpu()
    slots.store(req_idx, combined)
    wanted = (
        req_idx,
        tree.parent,
        tree.depth,
        tree.ancestors,
        tree.logprob,
        combined.origin,
        slots.parent,
        slots.depth,
        slots.ancestors,
        slots.score,
        slots.origin,
        slots.accepted,
    )
    assert len(calls) == 1 and all(a is b for a, b in zip(calls[0], wanted, strict=True))
