"""Tree attention in splits: equal bits in every batch, captured graph and form of launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention import MIXED, Chunk, Tree, check, launch, make_batch
from vllm_specblock.triton_kernels.attention import attention_schedule
from vllm_specblock.triton_kernels.attention.tree_attention_batch import see_last


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
def crowd(kernels, short_splits):
    requests = [Tree(700, 12), *[Chunk(600, 1)] * 11, Chunk(20, 70)]
    return make_batch(requests, group=2, dtype=torch.bfloat16, device=kernels.device)


@pytest.mark.parametrize("unknown_up_to", [0, 20])
def test_bits_do_not_depend_on_the_batch(kernels, crowd, unknown_up_to):
    """Alone a request's splits have programs of their own; in company one program reads them all;
    beside a long chunk other tiles are launched. A captured graph has room for twelve requests: the
    device finds out whether eight are there, from which on one program reads all splits."""
    rare = {"unknown_up_to": unknown_up_to}
    wanted = launch(kernels, crowd, **rare)
    check(wanted, crowd)
    parts = [(0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 4, 0), (12, 1, 0)]
    if unknown_up_to:
        parts += [(0, there, 12) for there in (1, 7, 8)]
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
