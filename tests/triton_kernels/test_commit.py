"""Moving cache entries: both paths against a plain loop that reads everything before it writes."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels.commit import KVCacheSet, move_kv

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


def moved(caches, source, target, moves):
    """What the caches should hold afterwards."""
    expected = [cache.clone() for cache in caches]
    rows = zip(source.flatten().tolist(), target.flatten().tolist(), moves.flatten().tolist())
    for start, stop, goes in rows:
        if not goes or start < 0 or stop < 0:
            continue
        for before, after in zip(caches, expected):
            after[stop // BLOCK_SIZE, :, stop % BLOCK_SIZE] = before[
                start // BLOCK_SIZE, :, start % BLOCK_SIZE
            ]
    return expected


@pytest.fixture(params=["reference", "kernel"])
def mover(request, kernels):
    """A device, and a function that moves in place there and returns what was expected."""
    module = kernels.load("commit")
    function = {"reference": module.move_kv_reference, "kernel": module.move_kv_triton}

    def move(caches, source, target, moves):
        expected = moved(caches, source, target, moves)
        on_device = (x.to(kernels.device) for x in (source, target, moves))
        function[request.param](module.KVCacheSet(caches), *on_device)
        return expected

    return kernels.device, move


def slots(*rows):
    return torch.tensor(rows, dtype=torch.int64)


def flags(*rows):
    return torch.tensor(rows, dtype=torch.bool)


CASES = {
    # A path shifts down by one: each row's target is the source of the row before it.
    "overlapping": (slots([5, 6, 7, 8]), slots([4, 5, 6, 7]), flags([1, 1, 1, 1])),
    "across blocks": (slots([3, 9, 14]), slots([2, 3, 4]), flags([1, 1, 1])),
    "nothing moves": (slots([5, 6, 7]), slots([1, 2, 3]), flags([0, 0, 0])),
    # The masked row's source is where the first row goes, its target where the third goes.
    "masked row in the way": (slots([9, 2, 12]), slots([2, 3, 3]), flags([1, 0, 1])),
    "masked first row": (slots([2, 9]), slots([9, 2]), flags([0, 1])),
    "padding": (slots([-1, 9, -1, 6]), slots([4, -1, -1, 5]), flags([1, 1, 1, 1])),
    "only padding": (slots([-1, -1]), slots([-1, -1]), flags([1, 0])),
    "requests": (
        slots([6, 7, -1], [22, 23, 20], [30, 30, 30]),
        slots([5, 6, -1], [20, 21, 22], [28, 28, 28]),
        flags([1, 1, 0], [1, 1, 0], [0, 0, 0]),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_moves(mover, case, layout):
    device, move = mover
    caches = make_caches(layout=layout, device=device)
    expected = move(caches, *CASES[case])
    for cache, wanted in zip(caches, expected):
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [8, 130])
def test_any_dtype_and_width(mover, dtype, width):
    device, move = mover
    caches = make_caches(width=width, dtype=dtype, device=device)
    expected = move(caches, *CASES["overlapping"])
    for cache, wanted in zip(caches, expected):
        assert torch.equal(cache, wanted)


def test_random_paths(mover):
    """Accepted paths as they occur: increasing sources, consecutive targets, at most the source."""
    device, move = mover
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        source, target, moves = [], [], []
        for base in (0, 16):
            path = torch.randperm(15, generator=generator)[:6].sort().values + 1
            accepted = int(torch.randint(0, 7, (), generator=generator))
            source.append(base + path)
            target.append(base + torch.arange(1, 7))
            moves.append((torch.arange(6) < accepted) & (path != torch.arange(1, 7)))
        caches = make_caches(layers=1, device=device)
        expected = move(caches, torch.stack(source), torch.stack(target), torch.stack(moves))
        assert torch.equal(caches[0], expected[0])


def test_strides_that_are_no_whole_rows(mover):
    device, move = mover
    dense = make_caches(layers=1, device=device)[0]
    packed = torch.zeros(8, dense[0].numel() + 3, device=device)
    view = packed[:, :-3].unflatten(1, dense.shape[1:])
    view.copy_(dense)
    expected = move([view], *CASES["overlapping"])
    torch.testing.assert_close(view, expected[0], atol=0, rtol=0)
    assert (packed[:, -3:] == 0).all()


def test_no_rows(mover):
    device, move = mover
    caches = make_caches(device=device)
    none = torch.zeros(2, 0, dtype=torch.int64)
    expected = move(caches, none, none, none.bool())
    assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected))


def test_cpu_tensors_take_the_reference():
    caches = make_caches()
    expected = moved(caches, *CASES["requests"])
    move_kv(KVCacheSet(caches), *CASES["requests"])
    assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected))


def test_caches_must_agree():
    first, second, _ = make_caches()
    with pytest.raises(ValueError, match="agree in shape"):
        KVCacheSet([first, second[:, :, :, :4]])
    with pytest.raises(ValueError, match="at least one layer"):
        KVCacheSet([])
