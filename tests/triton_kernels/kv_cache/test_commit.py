"""Moving cache entries: kernel and torch against a plain loop that reads before it writes."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on, wide
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows

from vllm_specblock.commit import move_path

BLOCK_SIZE = 4
LAYOUTS = {"heads first": (0, 1, 2, 3), "entries first": (0, 2, 1, 3)}


def make_caches(layers=3, width=10, layout="heads first", dtype=torch.float32, device="cpu"):
    """Caches of 8 blocks, 2 heads and 4 slots a block; every element of a cache is another one."""
    order = LAYOUTS[layout]
    shape = (8, 2, BLOCK_SIZE, width)
    caches = []
    for layer in range(layers):
        torch.manual_seed(layer)
        memory = torch.randn([shape[d] for d in order]).to(device, dtype)
        caches.append(memory.permute(order))  # each layout is its own inverse
    return caches


def some_paths(count: int, depth: int, seed: int, nodes: int = 5) -> tuple:
    """(slot_mapping, accepted rows, rows of the batch), rows anywhere in the cache or nowhere.

    The last request is padding: it has an old verdict, and no rows.
    """
    draw = torch.Generator().manual_seed(seed)
    base = torch.randint(1, 3, (count,), generator=draw)
    accepted = torch.randint(0, min(depth, nodes) + 1, (count,), generator=draw)
    path = torch.full((count, depth + 1), 1 << 40)
    for request, end in enumerate(accepted.tolist()):
        chosen = torch.randperm(nodes, generator=draw)[:end].sort().values + 1
        path[request, : end + 1] = torch.cat([torch.zeros(1).long(), chosen])
    rows = base + nodes
    rows[-1] = 0
    num_rows = int(rows.sum())
    slot = torch.full((num_rows + 5,), 1 << 40)
    slot[:num_rows] = torch.randperm(8 * BLOCK_SIZE, generator=draw)[:num_rows]
    slot[:num_rows][torch.rand(num_rows, generator=draw) < 0.1] = -1
    slot[num_rows - 1] = -1  # as behind every batch
    return slot, AcceptedRows(rows.cumsum(0) - rows, base, path, accepted.int()), num_rows


def moved(caches, slot_mapping, accepted_rows, num_rows):
    """What the caches should hold afterwards: node path[j] of every path at the j-th row."""
    expected = [cache.clone() for cache in caches]
    for first, own, nodes, end in zip(*(x.tolist() for x in accepted_rows)):
        for place in range(1, end + 1):
            rows = (min(first + own - 1 + at, num_rows - 1) for at in (nodes[place], place))
            source, target = (int(slot_mapping[row]) for row in rows)
            if source >= 0 and target >= 0:
                (block, at), (to, slot) = divmod(source, BLOCK_SIZE), divmod(target, BLOCK_SIZE)
                for before, after in zip(caches, expected):
                    after[to, :, slot] = before[block, :, at]
    return expected


@pytest.fixture(params=["torch", "kernel", "kernel, columns"])
def mover(request, kernels):
    """A device, and a function that moves in place there and returns what was expected."""
    module = kernels.load("commit")

    def move(caches, slots, rows, num_rows):
        expected = moved(caches, slots, rows, num_rows)
        launch = move_path.reference if request.param == "torch" else module.move_path_triton
        if request.param.endswith("columns"):
            rows = AcceptedRows(
                column(rows.query_start), column(rows.base), wide(rows.path), column(rows.accepted)
            )
        launch(module.KVCacheSet(caches), *on(kernels.device, (slots, rows)), num_rows)
        return expected

    return kernels.device, move


@pytest.mark.parametrize(
    "form",
    [
        *({"layout": layout} for layout in LAYOUTS),
        {"dtype": torch.bfloat16, "width": 130},
        {"dtype": torch.uint8, "width": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize(("count", "depth"), [(1, 1), (4, 5), (5, 13)])
def test_paths(mover, count, depth, form):
    device, move = mover
    changed = 0
    for seed in range(3):
        caches = make_caches(**form, device=device)
        before = [cache.clone() for cache in caches]
        expected = move(caches, *some_paths(count, depth, seed))
        assert_equal(caches, expected)
        changed += sum(not torch.equal(*each) for each in zip(caches, before))
    assert changed or count == 1, "nothing moved"


def test_a_path_that_shifts_down(mover):
    """Every node goes where the one before it was: reading after writing would show."""
    device, move = mover
    path, slots = torch.tensor([[0, 2, 3, 4, 5]]), torch.arange(6).flip(0)
    start, accepted = torch.zeros(1, dtype=torch.int64), torch.tensor([4], dtype=torch.int32)
    caches = make_caches(device=device)
    expected = move(caches, slots, AcceptedRows(start, start + 1, path, accepted), 6)
    assert_equal(caches, expected)
    assert (caches[0] != make_caches(device=device)[0]).any()


def test_strides_that_are_no_whole_rows(mover):
    device, move = mover
    dense = make_caches(layers=1, device=device)[0]
    packed = torch.zeros(8, dense[0].numel() + 3, device=device)
    view = packed[:, :-3].unflatten(1, dense.shape[1:])
    view.copy_(dense)
    assert_equal([view], move([view], *some_paths(4, 5, 1)))
    assert (packed[:, -3:] == 0).all()


@pytest.mark.parametrize(("count", "depth"), [(0, 3), (2, 0)])
def test_no_paths(mover, count, depth):
    device, move = mover
    caches, path = make_caches(device=device), torch.zeros(count, depth + 1).long()
    rows = AcceptedRows(path[:, 0], path[:, 0] + 1, path, path[:, 0].int())
    assert_equal(caches, move(caches, torch.arange(4), rows, 4))
