"""One visibility rule for prefill, decode, trees and draft blocks, held to a set-based oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention import (
    LAYOUTS,
    MIXED,
    TOLERANCE,
    Blind,
    Chunk,
    Tree,
    check,
    launch,
    make_batch,
    reference,
)
from support.tensors import on
from vllm_specblock.triton_kernels.attention import attention_schedule
from vllm_specblock.triton_kernels.attention.tree_attention_batch import see_last

FP8 = torch.float8_e4m3fn


@pytest.fixture
def check_all(kernels):
    """Hold the kernels and the torch reference to the oracle; options as `Batch.arguments`."""

    def check_forms(batch, oracle=None, **options):
        for got in (launch(kernels, batch, **options), reference(batch, **options)):
            check(got, batch, **(oracle or {}))

    return check_forms


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_mixed_batch(kernels, check_all, group, dtype):
    batch = make_batch(
        MIXED, group=group, num_kv_heads=1, dtype=dtype, device=kernels.device, tail=3
    )
    check_all(batch)


SHAPES = [
    *(
        ([Tree(41, 6), Chunk(30, 3)], {"head_size": size, "group": 2, "block_size": 8})
        for size in (64, 96, 128, 256)
    ),
    *(  # up to the last bit of every word
        (
            [Chunk(9, 1), Tree(11, 64 * words - 1), Tree(2, 5)],
            {"num_words": words, "num_kv_heads": 1, "block_size": 32},
        )
        for words in (1, 2, 5)
    ),
    *(
        ([Tree(90, 4), Chunk(0, 11)], {"block_size": size, "layout": layout})
        for size in (5, 80)  # 80 = 16 slots of a drafter with K = 5
        for layout in LAYOUTS
    ),
    ([Chunk(70, 50), Chunk(0, 1)], {"group": 3, "num_kv_heads": 1, "tail": 400}),  # many tiles
    ([Blind(3), Tree(4, 3), Blind(0), Blind(2)], {}),
]


@pytest.mark.parametrize(("requests", "sizes"), SHAPES, ids=str)
def test_shapes_and_layouts(kernels, check_all, requests, sizes):
    check_all(make_batch(requests, device=kernels.device, **sizes))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [(48, 32), (576, 512)], ids=str)
def test_values_that_begin_their_keys(kernels, check_all, sizes, dtype):
    """Multi-head latent attention: one KV head; DeepSeek's sizes, and odd ones."""
    key_size, value_size = sizes
    size = {"head_size": key_size, "value_size": value_size, "num_kv_heads": 1, "group": 4}
    requests = [*MIXED, Blind(2), Chunk(700, 2)]
    check_all(make_batch(requests, dtype=dtype, device=kernels.device, tail=2, **size))


def test_buffers_longer_than_the_batch_strided_query_and_output(kernels):
    """An engine passes the front of buffers that were made once for the largest batch."""
    batch = make_batch(MIXED, device=kernels.device)
    num_tokens, num_heads, size = batch.query.shape
    fused = torch.randn(num_tokens, 3 * num_heads * size, device=kernels.device)
    query = fused[:, : num_heads * size].unflatten(1, (num_heads, size))
    batch.query = query.copy_(batch.query)
    for name in ("tree_start", "block_table", "prefix_len", "mask_words"):
        own = getattr(batch, name)
        setattr(batch, name, torch.cat([own, torch.full_like(own[:2], 3)]))
    out = torch.full((num_heads, num_tokens, size), torch.nan, device=kernels.device)
    check(launch(kernels, batch, out.transpose(0, 1)), batch)


def test_bounds_cut_what_the_rule_would_show(kernels, check_all):
    """Entries from seq_len or max_seq_len on are not read, although prefix and bits show them."""
    batch = make_batch([Tree(40, 20), Tree(10, 20)], device=kernels.device)
    batch.seq_len[0], most = 45, 27
    batch.visible = [(r, {e for e in seen if e < most}) for r, seen in batch.visible]
    check_all(batch, max_seq_len=most)


def test_entries_that_no_query_sees_are_not_read(kernels, check_all):
    """seq_len is an upper bound: up to it there may be memory that was never written (NaN here)."""
    batch = make_batch([Tree(20, 3), Chunk(17, 2), Tree(5, 2)], device=kernels.device)
    batch.seq_len += torch.tensor([8, 10, 8], dtype=torch.int32, device=kernels.device)
    check_all(batch)


# 3 is less than a path, 17 and 70 are less than most contexts, 500 is more than any.
@pytest.mark.parametrize("window", [3, 17, 70, 500])
@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([*MIXED, Chunk(150, 3)], {"group": 2, "tail": 2}),
        ([Tree(11, 255), Chunk(0, 3)], {"num_words": 4, "num_kv_heads": 1}),  # cuts every word
    ],
    ids=["mixed", "tree"],
)
def test_sliding_window(kernels, check_all, window, requests, sizes):
    batch = make_batch(requests, device=kernels.device, **sizes)
    prefix_from, batch.mask_words = see_last(batch.prefix_len, batch.mask_words, window)
    check_all(batch, {"window": window}, prefix_from=prefix_from)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(kernels, check_all, soft_cap):
    batch = make_batch(MIXED, group=2, device=kernels.device)
    batch.query *= 20  # far into the cap
    check_all(batch, {"soft_cap": soft_cap}, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("dtype", "level"),
    [(torch.float32, -80.0), *((dtype, 0.5) for dtype in TOLERANCE), (torch.float32, 80.0)],
    ids=str,
)
def test_sinks(kernels, check_all, dtype, level):
    """Far below the scores, among them, and far above; one split and several, and blind rows."""
    requests = [*MIXED, Blind(2), Chunk(700, 3)]
    batch = make_batch(requests, group=2, dtype=dtype, device=kernels.device, tail=2)
    sinks = level + torch.randn(batch.query.shape[1], generator=torch.Generator().manual_seed(3))
    check_all(batch, {"sinks": sinks}, sinks=sinks.to(kernels.device))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fp8_cache(kernels, check_all, dtype):
    scales = {"key_scale": 0.5, "value_scale": 3.0}
    batch = make_batch(MIXED, group=2, dtype=dtype, cache_dtype=FP8, device=kernels.device)
    on_device = {name: torch.tensor(s, device=kernels.device) for name, s in scales.items()}
    check_all(batch, {"largest": 3.0, **scales}, **on_device)


@pytest.mark.parametrize("rare", [{}, {"soft_cap": 2.0}, {"sinks": torch.linspace(-9, 3, 4)}])
def test_fp8_queries(kernels, rare):
    """One tile of entries, so that weights are rounded relative to the largest of all."""
    few = [Chunk(5, 7), Tree(20, 6), Chunk(37, 1), Blind(2)]
    batch = make_batch(few, group=2, dtype=FP8, device=kernels.device, tail=2)
    scales = {"query_scale": 3.0, "key_scale": 0.5, "value_scale": 2.0}
    given = on(kernels.device, {name: torch.tensor(s) for name, s in scales.items()} | rare)
    scales["key_scale"] *= scales.pop("query_scale")
    for got in (launch(kernels, batch, **given), reference(batch, **given)):
        wanted = batch.oracle(**scales, **rare)
        torch.testing.assert_close(got.cpu().double(), wanted, atol=2e-5, rtol=2e-5)


# ---- Splits: equal bits in every batch, captured graph and form of launch ----
def test_layers_of_one_step_may_have_different_windows():
    batch = make_batch(MIXED)
    queries = batch.queries()
    for window in (None, 5, 40, None, 5):
        out = queries.attend(batch.query, batch.kv_cache, 32**-0.5, window=window)
        check(out, batch, window=window)


@pytest.fixture
def short_splits(monkeypatch):
    """Splits at lengths that the interpreter can afford."""
    monkeypatch.setattr(attention_schedule, "SPLIT_ENTRIES", 128)
    monkeypatch.setattr(attention_schedule, "PROGRAMS", 16)


LONG = [Tree(700, 12), Chunk(301, 40), Tree(90, 3), Chunk(530, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("requests", "window"),
    [(LONG[:1], None), (LONG, None), ([Tree(700, 60)], None), (LONG[:1], 400)],
    ids=["a program for each split", "one for all", "two tiles of 128 rows", "under a window"],
)
def test_long_contexts_in_splits(kernels, short_splits, requests, window, dtype):
    sizes = {"group": 3, "num_kv_heads": 2, "tail": 2}
    batch = make_batch(requests, dtype=dtype, device=kernels.device, **sizes)
    prefix_from = None
    if window is not None:
        prefix_from, batch.mask_words = see_last(batch.prefix_len, batch.mask_words, window)
    check(launch(kernels, batch, prefix_from=prefix_from), batch, window=window)


def chunk_of(batch, first: int, count: int, requests: int = 0):
    """Requests `first` … of a batch, and after them others without rows, up to `requests`."""
    part = slice(first, first + max(count, requests))
    start = batch.query_start[first : first + count + 1]
    rows = slice(int(start[0]), int(start[-1]))
    start = torch.cat([start, start[-1:].expand(max(requests - count, 0))])
    return replace(
        batch,
        query=batch.query[rows],
        block_table=batch.block_table[part],
        query_start=start - start[0],
        seq_len=batch.seq_len[part],
        prefix_len=batch.prefix_len[rows],
        mask_words=batch.mask_words[rows],
        tree_start=batch.tree_start[part],
    )


@pytest.fixture
def crowd(kernels, short_splits, monkeypatch):
    monkeypatch.setattr(attention_schedule, "PROGRAMS", 8)
    requests = [Tree(400, 12), *[Chunk(300, 1)] * 5, Chunk(20, 70)]
    return make_batch(requests, group=2, dtype=torch.bfloat16, device=kernels.device)


@pytest.mark.parametrize("unknown_up_to", [0, 20])
def test_bits_do_not_depend_on_the_batch(kernels, crowd, unknown_up_to):
    """Alone a request's splits have programs of their own; in company one program reads them all;
    beside a long chunk other tiles are launched. A captured graph has room for six requests: the
    device finds out whether four are there, from which on one program reads all splits."""
    rare = {"unknown_up_to": unknown_up_to}
    wanted = launch(kernels, crowd, **rare)
    check(wanted, crowd)
    parts = [(0, 1, 0), (0, 3, 0), (1, 1, 0), (6, 1, 0)]
    if unknown_up_to:
        parts += [(0, there, 6) for there in (1, 3, 4)]
    for first, count, room in parts:
        few = chunk_of(crowd, first, count, room)
        assert len(few.query_start) == max(count, room) + 1
        begin = int(crowd.query_start[first])
        assert torch.equal(launch(kernels, few, **rare), wanted[begin : begin + len(few.query)])


def test_lengths_that_were_not_foreseen_are_attended(kernels, short_splits):
    """A captured graph knows the largest length only; requests of unknown length share a class."""
    batch = make_batch([Tree(300, 20), Chunk(40, 1), Chunk(0, 9)], device=kernels.device)
    for lens in ({21}, {1, 64}):
        check(launch(kernels, batch, query_lens=lens), batch)
    trees = [Tree(300, 20), Chunk(40, 1), Tree(61, 5), Tree(700, 39)]
    for requests, longest in ((trees, 40), ([*trees, Chunk(9, 120)], 120)):
        batch = make_batch(requests, device=kernels.device)
        bounds = batch.queries(max_query_len=longest, unknown_up_to=40).bounds
        check(launch(kernels, batch, **bounds._asdict()), batch)
