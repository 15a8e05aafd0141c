"""The CPU's attention over packed caches, held to the set-based oracle."""

from __future__ import annotations

import pytest
import torch
from support.attention import MIXED, Blind, Chunk, Tree, check, make_batch

pytest.importorskip("numba")

from vllm_specblock.triton_kernels.attention import cpu_attention
from vllm_specblock.triton_kernels.attention.cpu_packing import (
    Packing,
    move_packed,
    packing_of,
    store_packed,
)

FP8 = torch.float8_e4m3fn
FORMS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "amx": (torch.bfloat16, True),
}


@pytest.fixture(params=FORMS)
def form(request) -> tuple[torch.dtype, bool]:
    dtype, amx = FORMS[request.param]
    if amx and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no tile registers")
    return dtype, amx


def pack(kv_cache: torch.Tensor, amx: bool) -> tuple[torch.Tensor, Packing]:
    """A packed copy of a cache [blocks, H, N, 2D]; unwritten entries become 0."""
    packed = torch.zeros_like(kv_cache.transpose(1, 2).contiguous()).transpose(1, 2)
    packing = packing_of(packed, amx)
    entries = kv_cache.float().nan_to_num().to(kv_cache.dtype).transpose(1, 2).flatten(0, 1)
    key, value = entries.chunk(2, dim=-1)
    store_packed(packed, packing, torch.arange(len(entries)), key, value)
    return packed, packing


def attend(batch, amx, scales=None, **options):
    cache, packing = pack(batch.kv_cache, amx)
    if scales is not None:
        options["key_scale"], options["value_scale"] = map(torch.tensor, scales)
    out, scale = torch.full_like(batch.query, torch.nan), batch.query.shape[-1] ** -0.5
    return batch.queries().attend(batch.query, cache, scale, out, packing=packing, **options)


@pytest.mark.parametrize("group, head_size", [(1, 32), (3, 64), (9, 96)])
def test_mixed_batch(form, group, head_size):
    dtype, amx = form
    batch = make_batch(
        [*MIXED, Blind(3)], group=group, head_size=head_size, block_size=32, dtype=dtype, tail=3
    )
    check(attend(batch, amx), batch)


def test_more_entries_than_one_tile_holds(form):
    dtype, amx = form
    batch = make_batch([Tree(2100, 40), Chunk(1020, 70)], block_size=96, dtype=dtype, num_words=2)
    check(attend(batch, amx), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_8_bits(dtype):
    """Keys and values by scales of their own, behind a soft cap, too."""
    batch = make_batch([*MIXED, Blind(3)], group=3, block_size=32, dtype=dtype, cache_dtype=FP8)
    for soft_cap in (0.0, 2.0):
        got = attend(batch, False, soft_cap=soft_cap, scales=(0.5, 3.0))
        check(got, batch, 3.0, key_scale=0.5, value_scale=3.0, soft_cap=soft_cap)


def test_every_number_of_8_bits_is_read():
    """Rows that see one entry get its values, subnormals and all; there are no infinities."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0  # NaN, which vLLM's kernel does not store
    numbers = numbers.view(8, 32).view(FP8)
    batch = make_batch([Chunk(0, 8)], num_kv_heads=1, head_size=32, block_size=32, cache_dtype=FP8)
    block = int(batch.block_table[0, 0])
    batch.kv_cache[block, 0, :8, 32:] = numbers
    batch.prefix_len[:] = 0
    batch.mask_words[:, 0] = 1 << torch.arange(8)
    got = attend(batch, False)
    assert torch.equal(got[:, 0], numbers.float()) and got.abs().max() == 448


@pytest.mark.parametrize(("window", "level"), [(None, -80.0), (1, None), (7, 0.5), (1500, 80.0)])
def test_sinks_and_windows(form, window, level):
    """Sinks far below the scores, among them, and far above; a row without entries stays zero."""
    dtype, amx = form
    requests = [*MIXED, Blind(3), Tree(1020, 30), Tree(2100, 20)]
    batch = make_batch(requests, group=3, block_size=32, dtype=dtype)
    noise = torch.randn(batch.query.shape[1], generator=torch.Generator().manual_seed(3))
    sinks = None if level is None else level + noise
    check(attend(batch, amx, window=window, sinks=sinks), batch, window=window, sinks=sinks)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_neighbours_and_threads_change_nothing(form, threads, monkeypatch):
    """The same request alone by one thread, and beside others by several, bit for bit."""
    dtype, amx = form
    sizes = {"group": 3, "block_size": 32, "dtype": dtype}
    alone = make_batch([Tree(1400, 25)], **sizes)
    wanted = attend(alone, amx)
    several = make_batch([Tree(1400, 25), Chunk(900, 40), Tree(3, 9)], **sizes)
    several.query[: len(wanted)] = alone.query
    blocks = slice(-(-1426 // 32))
    there, here = several.block_table[0, blocks], alone.block_table[0, blocks]
    several.kv_cache[there] = alone.kv_cache[here]
    monkeypatch.setattr(cpu_attention, "_LEAST_WORK", 1)
    monkeypatch.setattr(cpu_attention, "team_size", lambda: threads)
    got = attend(several, amx)
    check(got, several)
    assert torch.equal(got[: len(wanted)], wanted)


def test_requests_that_are_left_out_stay_as_they_are():
    batch = make_batch([Tree(5, 3), Chunk(9, 2)], block_size=32)
    got = attend(batch, False, causal_elsewhere=True)
    assert got[4:].isnan().all() and not got[:4].isnan().any()


def test_a_path_moves_down(form):
    """Entries move in every layer, and a target that is a source of its own row is read first."""
    dtype, amx = form
    generator = torch.Generator().manual_seed(0)
    size = (3, 64, 2, 2 * 32)  # two layers; blocks, entries, heads
    plain = [torch.randn(size, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)]
    packed = [pack(cache, amx) for cache in plain]
    source = torch.tensor([[66, 68, 190, -1], [3, -1, 7, 8]])
    target = torch.tensor([[65, 66, 67, 68], [2, 3, -1, 5]])
    pointers = torch.tensor([cache.data_ptr() for cache, _ in packed])
    move_packed(pointers, packed[0][0].stride(0), packed[0][1], source, target)
    for cache, (moved, _) in zip(plain, packed):
        entries = cache.transpose(1, 2).reshape(-1, 2, 64).clone()
        for old, new in ((66, 65), (68, 66), (190, 67), (3, 2), (8, 5)):
            entries[new] = entries[old]
        wanted, _ = pack(entries.view(size).transpose(1, 2), amx)
        assert torch.equal(moved, wanted)


def test_what_cannot_be_packed():
    cache = torch.zeros(2, 32, 2, 64).transpose(1, 2)
    assert packing_of(cache, True) == (0, False, 2, 32, 32)
    assert packing_of(cache[..., :60], False) is None
    assert packing_of(cache[:, :, :16], False) is None
    assert packing_of(cache.to(torch.float64), False) is None
    assert packing_of(cache[:, :1], False) is None  # a page with another layer's entries in it
