"""One launch per block gives every tensor that the torch reference gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.tensors import assert_equal, column, on
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.first_block_metadata import first_block_metadata
from vllm_specblock.triton_kernels.drafting.later_block_metadata import (
    CommittedRows,
    RowPointers,
    later_block_metadata,
)

from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder

MAX, TOKENS, BLOCKS = 203, 8, 4  # the length limit, tokens of a cache block, M


def some_rows(requests: int) -> SimpleNamespace:
    """Requests of 1 to 9 rows, with padding behind some newest rows, up to the length limit."""
    lengths = torch.randint(1, 10, (requests,))
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    last = torch.rand(requests).mul(lengths).long()
    newest = torch.randint(9, MAX - 40, (requests,))
    newest[requests // 2 :] = MAX - 1 - torch.arange(requests - requests // 2) % 9
    request = torch.arange(requests).repeat_interleave(lengths)
    local = torch.arange(len(request)) - row_start[request]
    position = newest[request] - last[request] + local
    kv_slot = torch.randint(0, 1 << 40, position.shape)
    kv_slot[local > last[request]] = -1
    return SimpleNamespace(
        position=column(position),
        index=column(position - TOKENS * (request % 2)),
        kv_slot=column(kv_slot),
        row_start=column(row_start.int()),
        last=column(row_start[:-1] + last),
    )


def some_starts(requests: int, starts: int, size: int, block: int) -> NextStarts:
    """Anywhere in the rows so far; the drafting row is among them."""
    shape = (starts, requests)
    row = torch.randint(0, 1 + (block - 2) * starts, shape)
    row[torch.rand(shape) < 0.2] = 0
    position = torch.randint(0, size, shape)
    valid = torch.rand(shape) > 0.2
    return NextStarts._make(x.t() for x in (row, row, row, position, valid))


@pytest.fixture
def launches(kernels, monkeypatch):
    """The launches of the first block and of later ones; their results begin as garbage."""
    first, later = kernels.load("first_block_metadata"), kernels.load("later_block_metadata")
    empty = torch.empty
    monkeypatch.setattr(later.torch, "empty", lambda *s, **options: empty(*s, **options).fill_(99))
    return first.first_block_metadata_triton, later.later_block_metadata_triton


@pytest.mark.parametrize(
    ("requests", "size", "starts"), [(1, 4, 8), (20, 1, 8), (20, 3, 3), (20, 4, 1), (256, 2, 2)]
)
# A table that ends before the length limit: behind it, its last block is read.
@pytest.mark.parametrize(
    ("width", "path_rope"),
    [(-(-MAX // TOKENS), True), (12, False)],
    ids=["whole table, path", "short table, base"],
)
def test_as_torch_sees(launches, kernels, requests, size, starts, width, path_rope):
    torch.manual_seed(requests + 10 * size + starts)
    launch_first, launch_later = launches
    rows, device = some_rows(requests), kernels.device
    found = launch_first(SimpleNamespace(**on(device, vars(rows))), size)
    assert_equal(tuple(found), tuple(first_block_metadata.reference(rows, size)))

    shape = TreeShape(size, BLOCKS, starts, (1, 1, 1, 1), 1)
    builder = DraftAttentionBuilder([torch.empty(0)], shape, MAX, path_rope)
    # Twice as wide as what is used of it.
    table = torch.randint(0, 1 << 30, (requests, 2 * width), dtype=torch.int32)[:, :width]
    committed = CommittedRows(rows.position, rows.index, rows.last, table)
    drafted_rows, _, words = builder.own.shape
    kept = RowPointers(
        torch.full((requests, drafted_rows), 1 << 60),
        torch.full((requests, drafted_rows, words), 1 << 60),
        torch.full((requests, drafted_rows), 1 << 60) if path_rope else None,
    )
    there, everywhere, nowhere = on(device, kept), 0, 0
    for block in range(2, BLOCKS + 1):
        where = some_starts(requests, starts, size, block)
        given = where, committed, builder.own
        limits = block, TOKENS, MAX, path_rope and size == 1  # as EAGLE-2's levels are
        found = launch_later(*on(device, given), there, *limits)
        wanted = later_block_metadata.reference(*given, kept, *limits)
        assert_equal(tuple(found), tuple(wanted))
        assert_equal(*([x for x in each if x is not None] for each in (there, kept)))
        assert not (wanted.valid & ~where.valid).any()
        everywhere += int(wanted.valid.sum())
        nowhere += int((where.valid & ~wanted.valid).sum())
    assert requests < 20 or (nowhere and everywhere), "the length limit was not met"
