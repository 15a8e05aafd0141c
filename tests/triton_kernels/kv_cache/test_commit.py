"""A step's commit: entries move as in a plain loop, rows and tables are what torch says."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on, wide
from torch.nn.functional import pad
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows
from vllm_specblock.triton_kernels.kv_cache.committed_tokens import StepRows
from vllm_specblock.triton_kernels.kv_cache.mask_holes import RowsToWrite, mask_holes

from vllm_specblock.commit import committed_tokens, move_path

BLOCK_SIZE = 4
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


def spread(rows):
    """The same AcceptedRows or StepRows, no tensor of the requests contiguous."""
    columns = {name: column(getattr(rows, name)) for name in ("query_start", "base", "accepted")}
    tables = {name: wide(getattr(rows, name)) for name in ("path", "text") if hasattr(rows, name)}
    return rows._replace(**columns, **tables)


PATHS = {
    **{str(x): [some_paths(*x, seed) for seed in range(3)] for x in ((1, 1), (4, 5), (5, 13))},
    "shifting down": [shifting_down()],
    "none": [no_paths(0, 3), no_paths(2, 0)],
}
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
            rows = spread(rows)
        launch(module.KVCacheSet(caches), *on(kernels.device, (slots, rows)), num_rows)
        assert_equal(caches, expected)
        changed += sum(not torch.equal(*each) for each in zip(caches, before))
        if "apart" in form:
            assert all((cache._base[:, -form["apart"] :] == 0).all() for cache in caches)
    assert changed or paths in ("(1, 1)", "none"), "nothing moved"


# ---- Committed tokens ----
HUGE = 2**40


def ragged(count: int, seed: int, depth: int = 5, nodes: int = 11) -> tuple[StepRows, int]:
    """Arguments of `committed_tokens`: decodes, prompt chunks and requests without a verdict.

    The batch has a row of no request, and one request at the end without rows. Values that may not
    be read are far outside of every tensor.
    """
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    drafted = among(0, 3, count) > 0
    base = torch.where(among(0, 2, count) > 0, torch.ones(count).long(), among(1, 60, count))
    scheduled = base + torch.where(drafted, among(0, nodes, count), 0)
    path = torch.cat([torch.zeros(count, 1).long(), among(1, nodes, count, depth)], 1)
    path = path.sort(1).values
    accepted = torch.where(drafted, among(0, depth, count), 0).int()
    accepted = accepted.minimum((scheduled - base).int())
    unused = torch.arange(depth + 1) > accepted[:, None]
    path[unused & (among(0, 1, *path.shape) > 0)] = HUGE
    # A padding request: a layout like the others', no rows, and an old verdict.
    base[-1], scheduled[-1], accepted[-1], drafted[-1] = 1, 0, 3, True

    start = scheduled.cumsum(0) - scheduled
    num_rows = int(scheduled.sum()) + 1
    slots, longest = count + 3, 80
    known = torch.full((count, 3), HUGE)
    known[:, 0] = torch.randperm(slots, generator=draw)[:count]
    text, temperature = among(0, 30_000, slots, longest).int(), torch.rand(slots, generator=draw)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[known[:, 0]] = False
    text[unused], temperature[unused] = -1, float("nan")
    positions = among(0, longest - 1, num_rows)  # up to the last token that there is place for
    rows = base + torch.where(drafted, depth, 0)
    row_start = pad(rows.cumsum(0), (1, 0))
    request = torch.arange(count).repeat_interleave(rows)
    local = torch.arange(len(request)) - row_start[request]
    slot_mapping = torch.cat([among(0, 999, num_rows), torch.full((9,), HUGE)])
    of_paths, layout = (start, base, path, accepted), (request, local, row_start.int())
    of_batch, of_slots = (positions, slot_mapping), (known[:, 0], text, temperature)
    hidden, first = 16 * among(0, 2, 2, count)
    return StepRows(*of_paths, *layout, *of_batch, *of_slots, hidden, first), num_rows


# Rows of one program, of several; 300 requests are more than a program's, too. Depth 0: no drafts.
@pytest.mark.parametrize(("count", "depth"), [(1, 5), (3, 5), (17, 5), (300, 5), (130, 0)])
@pytest.mark.parametrize("form", [StepRows._make, spread], ids=["plain", "strided"])
def test_committed_tokens(kernels, count, depth, form):
    launch = kernels.load("committed_tokens").committed_tokens_triton
    step, num_rows = ragged(count, seed=count, depth=depth)
    found = launch(on(kernels.device, form(step)), num_rows)
    assert_equal(tuple(found), tuple(committed_tokens(step, num_rows)))


def test_committed_tokens_of_no_requests(kernels):
    step, num_rows = ragged(2, 0)
    of_batch = {"positions", "slot_mapping", "text", "temperature"}
    none = {x: getattr(step, x)[: x == "row_start"] for x in set(step._fields) - of_batch}
    launch = kernels.load("committed_tokens").committed_tokens_triton
    found = launch(on(kernels.device, step._replace(**none)), num_rows)
    assert [tuple(x.shape) for x in found] == [(0,)] * 7


# ---- Holes ----
@pytest.mark.parametrize(("width", "columns"), [(5, 1024), (40, 16)])
def test_tables_without_holes(kernels, monkeypatch, width, columns):
    """Blocks that no request writes may be in several tables, and behind the last row in any."""
    module = kernels.load("mask_holes")
    monkeypatch.setattr(module, "COLUMNS", columns)
    draw, requests, size = torch.Generator().manual_seed(width), 6, 8
    own = torch.randperm(requests * width, generator=draw).view(requests, width) + 1
    own[1:, : width // 4] = own[0, : width // 4]  # a shared prefix
    first = torch.randint(width // 4 * size, (width - 2) * size, (requests,), generator=draw)
    first[:4] = first[:4] // size * size + 3
    last = first + torch.randint(0, 2 * size, (requests,), generator=draw)
    last[:2] = first[:2]
    missing = torch.full((requests * width + 2,), size)
    holes = torch.randint(1, len(missing) - 1, (len(missing) // 3,), generator=draw)
    missing[holes] = torch.randint(0, size, holes.shape, generator=draw)
    current = own.gather(1, (first // size)[:, None])[:, 0]
    missing[current[:4]] = torch.tensor([2, 3, 0, 3])
    found = []
    for mask in (mask_holes.reference, module.mask_holes_triton):
        to = "cpu" if mask is mask_holes.reference else kernels.device
        table = torch.zeros(requests, width + 3, dtype=torch.int32, device=to)
        table[:, :width] = own
        state, masks = missing.to(to, copy=True), torch.full((2, requests), -1, device=to)
        rows = RowsToWrite(state, table[:, :width], first.to(to), last.to(to), *masks)
        blind = mask(rows, size)
        found.append([x.cpu() for x in (table, masks, blind, state[:-1])])
    assert found[0][2].any() and not found[0][2].all() and (found[0][1][0] > 0).any()
    assert_equal(*found)
