"""Moving cache entries: kernel and torch against a plain loop that reads before it writes."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on, wide
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows

from vllm_specblock.commit.move import move_path

BLOCK_SIZE = 4
ROWS = ("query_start", "base", "accepted")
LAYOUTS = {"heads first": (0, 1, 2, 3), "entries first": (0, 2, 1, 3)}


def make_caches(width=10, layout="heads first", dtype=torch.float32, device="cpu", apart=0):
    """Caches of 8 blocks, 2 heads and 4 slots a block; every element of a cache is another one.

    apart: elements between two blocks, which are 0.
    """
    order = LAYOUTS[layout]
    shape = (8, 2, BLOCK_SIZE, width)
    caches = []
    for layer in range(3):
        torch.manual_seed(layer)
        memory = torch.randn([shape[d] for d in order])
        memory = pad(memory.flatten(1), (0, apart)).to(device, dtype)
        memory = memory[:, : memory.shape[1] - apart].unflatten(1, [shape[d] for d in order[1:]])
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


def shifting_down() -> tuple:
    """Every node goes where the one before it was: reading after writing would show."""
    path, slots = torch.tensor([[0, 2, 3, 4, 5]]), torch.arange(6).flip(0)
    start, accepted = torch.zeros(1, dtype=torch.int64), torch.tensor([4], dtype=torch.int32)
    return slots, AcceptedRows(start, start + 1, path, accepted), 6


def no_paths(count: int, depth: int) -> tuple:
    path = torch.zeros(count, depth + 1).long()
    rows = AcceptedRows(path[:, 0], path[:, 0] + 1, path, path[:, 0].int())
    return torch.arange(4), rows, 4


PATHS = {
    **{str(x): [some_paths(*x, seed) for seed in range(3)] for x in ((1, 1), (4, 5), (5, 13))},
    "shifting down": [shifting_down()],
    "none": [no_paths(0, 3), no_paths(2, 0)],
}
UNMOVED = ["(1, 1)", "none"]
FORMS = [
    *({"layout": layout} for layout in LAYOUTS),
    {"dtype": torch.bfloat16, "width": 130},
    {"dtype": torch.uint8, "width": 8},
    {"apart": 3},
]


@pytest.mark.parametrize("by", ["torch", "kernel", "kernel, columns"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("paths", PATHS)
def test_paths(kernels, paths, form, by):
    module, changed = kernels.load("commit"), 0
    launch = move_path.reference if by == "torch" else module.move_path_triton
    for slots, rows, num_rows in PATHS[paths]:
        caches = make_caches(**form, device=kernels.device)
        before = [cache.clone() for cache in caches]
        expected = moved(caches, slots, rows, num_rows)
        if by == "kernel, columns":
            columns = {name: column(getattr(rows, name)) for name in ROWS}
            rows = rows._replace(**columns, path=wide(rows.path))
        launch(module.KVCacheSet(caches), *on(kernels.device, (slots, rows)), num_rows)
        assert_equal(caches, expected)
        changed += sum(not torch.equal(*each) for each in zip(caches, before))
        if "apart" in form:
            assert all((cache._base[:, -form["apart"] :] == 0).all() for cache in caches)
    assert changed or paths in UNMOVED, "nothing moved"
