"""Attention metadata of a drafter's later blocks: KV indices, prefix lengths, mask words."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..op import op
from ..optional_triton import jit, next_power_of_2, strides_of, tl
from .expand import NextStarts


class LaterBlockMetadata(NamedTuple):
    """A later block: S rows of K positions for each of R requests, W words of bits."""

    kv_index: torch.Tensor  # [R·S, K] int64, negative where there is no slot
    query_start: torch.Tensor  # [R+1] int32
    prefix_len: torch.Tensor  # [R·S·K] int32
    mask_words: torch.Tensor  # [R·S·K, W] int64
    seq_len: torch.Tensor  # [R] int32
    tree_start: torch.Tensor  # [R] int32
    valid: torch.Tensor  # [R, S] bool, starts that count, and whose row has a slot
    source: torch.Tensor  # [R·S] int64, what each start goes on from: (request, row, position)
    base: torch.Tensor  # [R·S] int64, RoPE's position of each row's first


def later_block_metadata_triton(
    starts: NextStarts,
    committed: CommittedRows,
    drafted: DraftedRows,
    block: int,
    token_block: int,
    max_position: int,
    by_level: bool = False,
) -> LaterBlockMetadata:
    """Launch the kernel; arguments as `later_block_metadata` has them."""
    own, (requests, count) = drafted.own, starts.row.shape
    rows, block_size, num_words = own.shape
    cells = requests * count * block_size

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=own.device)

    metadata = LaterBlockMetadata(
        kv_index=empty(requests * count, block_size, dtype=torch.int64),
        query_start=empty(requests + 1),
        prefix_len=empty(cells),
        mask_words=empty(cells, num_words, dtype=torch.int64),
        seq_len=empty(requests),
        tree_start=empty(requests),
        valid=empty(requests, count, dtype=torch.bool),
        source=empty(requests * count, dtype=torch.int64),
        base=empty(requests * count, dtype=torch.int64),
    )
    _later_block_metadata_kernel[(requests + 1,)](
        NextStarts._make(x.contiguous() for x in starts),
        committed,
        strides_of(committed),
        drafted,
        metadata,
        requests,
        committed.block_table.shape[1],
        1 + (block - 2) * count,
        max_position,
        ROWS=rows,
        S=count,
        K=block_size,
        W=num_words,
        TOKENS=token_block,
        BY_LEVEL=by_level,
        num_warps=1 if count * block_size <= 64 else 4,
    )
    return metadata


@op(later_block_metadata_triton)
def later_block_metadata(
    starts: NextStarts,
    committed: CommittedRows,
    drafted: DraftedRows,
    block: int,
    token_block: int,
    max_position: int,
    by_level: bool = False,
) -> LaterBlockMetadata:
    """Return the metadata of block `block` ≥ 2, and fill in its rows of `drafted`.

    Args:
        starts: of the block.
        committed: of the step.
        token_block: tokens in one block of the table.
        max_position: positions at or beyond it have no slot.
        by_level: `source` counts the rows of the last block only, and a row's base is one less: a
            level's rows stand where EAGLE-3's do.
    """
    row, position = starts.row, starts.position
    own, (requests, S) = drafted.own, row.shape
    _, K, width = own.shape
    first_row, device = 1 + (block - 2) * S, row.device
    here, k = slice(first_row, first_row + S), torch.arange(K, device=device)
    newest, rope = committed.place[committed.last], committed.position[committed.last]  # [R]
    later = row > 0  # goes on from a row of this struct
    before = torch.where(later, drafted.prefix.gather(1, row), newest[:, None] * K + position + 1)
    path = drafted.bits.gather(1, row[..., None].expand(-1, -1, width))
    path = path.masked_fill(~later[..., None], 0) | own[row, position]  # [R, S, W]
    drafted.prefix[:, here], drafted.bits[:, here] = before, path
    base = (rope[:, None] + (not by_level)).expand_as(row)
    if drafted.reach is not None:
        reach = drafted.reach.gather(1, row).masked_fill(~later, 0) + position + 1
        drafted.reach[:, here], base = reach, base + reach

    limit = max_position - (rope - newest)  # [R]
    at = newest[:, None] + first_row + torch.arange(S, device=device)  # [R, S] places to borrow
    there = at < limit[:, None]
    table = committed.block_table
    kv_slot = table.gather(1, (at // token_block).clamp(max=table.shape[1] - 1)).long()
    kv_slot = kv_slot * token_block
    kv_slot = torch.where(there, kv_slot + at % token_block, -1)
    window = ((newest + 1) * K).int()
    gone = max(first_row - S, 0) if by_level else 0
    request = torch.arange(requests, device=device)[:, None]
    return LaterBlockMetadata(
        kv_index=(torch.where(kv_slot >= 0, kv_slot * K, -K)[..., None] + k).flatten(0, 1),
        query_start=torch.arange(0, requests * S * K + 1, S * K, dtype=torch.int32, device=device),
        prefix_len=before[..., None].expand(-1, -1, K).flatten().int(),
        mask_words=(path[:, :, None] | own[here]).flatten(0, 2),
        seq_len=(window + (block - 1) * S * K).minimum(limit * K).int(),
        tree_start=window,
        valid=starts.valid & there,
        source=((request * (first_row - gone) + row - gone) * K + position).flatten(),
        base=base.flatten(),
    )


class CommittedRows(NamedTuple):
    """The step's committed rows, and the tables of the requests that draft."""

    position: torch.Tensor  # [T] int64
    place: torch.Tensor  # [T] int64, `index` of `CommittedTokens`
    last: torch.Tensor  # [R] int64, the row that each request drafts from
    block_table: torch.Tensor  # [R, max blocks] int32


class DraftedRows(NamedTuple):
    """What rows see of earlier ones; contiguous. Of row 0, the drafting row, only `own` is read."""

    own: torch.Tensor  # [ROWS, K, W] int64, the bits up to each position of a row
    prefix: torch.Tensor  # [R, ROWS] int64, entries that a row sees as prefix
    bits: torch.Tensor  # [R, ROWS, W] int64, what it sees behind them
    # [R, ROWS] int64, tokens drafted before it; None: RoPE does not count them.
    reach: torch.Tensor | None


@jit(do_not_specialize=["num_requests", "table_width", "first_row"])
def _later_block_metadata_kernel(
    starts,  # NextStarts, contiguous
    committed,  # CommittedRows
    strides,  # CommittedRows, their strides
    kept,  # DraftedRows
    out,  # LaterBlockMetadata
    num_requests,  # R
    table_width,
    first_row,  # of this block
    max_position,
    ROWS: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,  # in one block of the table
    BY_LEVEL: tl.constexpr,
):
    """Handle the S·K positions of one request; one more program ends `query_start`."""
    request = tl.program_id(0)
    tl.store(out.query_start + request, request * (S * K))
    if request >= num_requests:
        return
    drafts_from = tl.load(committed.last + request * strides.last)
    rope = tl.load(committed.position + drafts_from * strides.position)
    newest = tl.load(committed.place + drafts_from * strides.place)
    longest = max_position - (rope - newest)  # in places of the block table
    ends = (newest + 1) * K
    tl.store(out.tree_start + request, ends.to(tl.int32))
    limit = tl.minimum(ends + (first_row - 1 + S) * K, longest * K)
    tl.store(out.seq_len + request, limit.to(tl.int32))

    place = tl.arange(0, next_power_of_2(S * K))
    inside = place < S * K
    start, k = place // K, place % K
    once = inside & (k == 0)  # what is one of a row, of the row's first position
    cell = request * (S * K) + place
    of_start = request * S + start
    from_row = tl.load(starts.row + of_start, mask=inside, other=0)
    from_k = tl.load(starts.position + of_start, mask=inside, other=0)
    drafted = inside & (from_row > 0)
    before = tl.load(kept.prefix + request * ROWS + from_row, mask=drafted, other=0)
    before = tl.where(drafted, before, newest * K + from_k + 1)
    tl.store(kept.prefix + request * ROWS + first_row + start, before, mask=once)
    tl.store(out.prefix_len + cell, before.to(tl.int32), mask=inside)
    # Earlier rows are grouped by request; their number is this block's first row.
    gone = tl.maximum(first_row - S, 0) if BY_LEVEL else 0
    goes_on = (request * (first_row - gone) + from_row - gone) * K + from_k
    tl.store(out.source + of_start, goes_on, mask=once)
    ahead = rope if BY_LEVEL else rope + 1
    if kept.reach is not None:
        longer = tl.load(kept.reach + request * ROWS + from_row, mask=drafted, other=0) + from_k + 1
        tl.store(kept.reach + request * ROWS + first_row + start, longer, mask=once)
        ahead += longer
    tl.store(out.base + of_start, ahead, mask=once)
    for w in range(W):
        path = tl.load(kept.bits + (request * ROWS + from_row) * W + w, mask=drafted, other=0)
        path |= tl.load(kept.own + (from_row * K + from_k) * W + w, mask=inside, other=0)
        tl.store(kept.bits + (request * ROWS + first_row + start) * W + w, path, mask=once)
        mine = tl.load(kept.own + ((first_row + start) * K + k) * W + w, mask=inside, other=0)
        tl.store(out.mask_words + cell * W + w, path | mine, mask=inside)

    at = newest + first_row + start  # the place to borrow
    real = at < longest
    column = tl.minimum(at // TOKENS, table_width - 1)
    borrowed = committed.block_table + request.to(tl.int64) * strides.block_table + column
    kv_slot = tl.load(borrowed, mask=inside & real, other=-1).to(tl.int64) * TOKENS
    kv_slot = tl.where(real, kv_slot + at % TOKENS, -1)
    tl.store(out.kv_index + cell, tl.where(kv_slot >= 0, kv_slot * K, -K) + k, mask=inside)
    counts = tl.load(starts.valid + of_start, mask=once, other=0) != 0
    tl.store(out.valid + of_start, real & counts, mask=once)
