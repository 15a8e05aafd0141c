"""Block tables without cache blocks that drafters have not written completely."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..op import op
from ..optional_triton import jit, next_power_of_2, tl

COLUMNS = 1024  # of a table, at a time


class RowsToWrite(NamedTuple):
    """The next rows that drafters of R requests write, and their block tables."""

    # [blocks + 1] int64, the first missing row of each block, `block_size` where it is complete;
    # changed in place.
    missing: torch.Tensor
    # [R, columns] int32, changed in place; zeros take the place of removed blocks.
    table: torch.Tensor
    first: torch.Tensor  # [R] int64, positions of the first row, and of the last one
    last: torch.Tensor
    hidden: torch.Tensor  # [R] int64, written: tokens in removed blocks
    start: torch.Tensor  # [R] int64, written: the first position to store, 0 for all


def mask_holes_triton(rows: RowsToWrite, block_size: int) -> torch.Tensor:
    """Launch the kernel, one program per request; see `mask_holes`."""
    requests, width = rows.table.shape
    blind = torch.empty(requests, dtype=torch.bool, device=rows.table.device)
    _mask_holes_kernel[(requests,)](
        rows,
        rows.table.stride(0),
        blind,
        width,
        BLOCK_SIZE=block_size,
        COLUMNS=min(next_power_of_2(width), COLUMNS),
    )
    return blind


@op(mask_holes_triton)
def mask_holes(rows: RowsToWrite, block_size: int) -> torch.Tensor:
    """Remove incomplete blocks from the tables of requests whose next rows will be written.

    A block that a request writes from its first missing row on becomes complete. A block with
    missing rows before the request's stays in the table, and is not written.

    Returns [R] bool, requests whose rows all lie in an incomplete block.
    """
    missing, table, first, last, hidden, start = rows
    index, column = table.long(), torch.arange(table.shape[1], device=table.device)
    gap = missing[index]
    current, end = (first // block_size)[:, None], (last // block_size)[:, None]
    here = column == current
    hole = torch.where(here, gap < (first % block_size)[:, None], gap < block_size)
    hole &= column <= current
    begun = (hole & here).any(1)
    blind = begun & (last // block_size == first // block_size)
    # Blocks that are written from here on, or up to here: complete until a row is skipped.
    written = (column >= current) & (column <= end) & ~hole
    missing[torch.where(written, index, len(missing) - 1)] = block_size
    hole &= ~(here & blind[:, None])
    torch.mul(hole.sum(1), block_size, out=hidden)
    torch.mul(first // block_size + 1, begun * block_size, out=start)
    place = torch.where(hole, len(column), (~hole).cumsum(1) - 1)
    kept = table.new_zeros(len(table), len(column) + 1).scatter_(1, place, table)
    table.copy_(kept[:, :-1])
    return blind


@jit(do_not_specialize=["width"])
def _mask_holes_kernel(
    rows,  # RowsToWrite
    table_stride,
    blind_ptr,  # [R] bool
    width,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Handle one request, COLUMNS columns of its table at a time."""
    request = tl.program_id(0).to(tl.int64)
    table, missing = rows.table + request * table_stride, rows.missing
    begin = tl.load(rows.first + request)
    current, end = begin // BLOCK_SIZE, tl.load(rows.last + request) // BLOCK_SIZE
    first_block = tl.load(table + current, mask=current < width, other=0)
    first_gap = tl.load(missing + first_block, mask=current < width, other=BLOCK_SIZE)
    begun = first_gap < begin % BLOCK_SIZE
    without = begun & (current == end)
    kept = 0
    for at in range(0, width, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = column < width
        block = tl.load(table + column, mask=inside, other=0)
        gap = tl.load(missing + block, mask=column < current, other=BLOCK_SIZE)
        hole = tl.where(column == current, begun, gap < BLOCK_SIZE)
        # Other requests' programs read none of these: a block that is written has one request.
        written = inside & (column >= current) & (column <= end) & (hole == 0)
        tl.store(missing + block, BLOCK_SIZE, mask=written)
        keep = (inside & ((hole == 0) | ((column == current) & without))).to(tl.int32)
        place = kept + tl.cumsum(keep, 0) - 1
        # Threads hold different columns: every thread must have read before one writes.
        tl.debug_barrier()
        tl.store(table + place, block, mask=keep != 0)
        kept += tl.sum(keep, 0)
    for at in range(0, width, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        tl.store(table + column, 0, mask=(column >= kept) & (column < width))
    tl.store(rows.hidden + request, (width - kept).to(tl.int64) * BLOCK_SIZE)
    tl.store(rows.start + request, tl.where(begun, (current + 1) * BLOCK_SIZE, 0))
    tl.store(blind_ptr + request, without)
