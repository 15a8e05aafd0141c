"""Attention metadata of a drafter's later blocks: KV indices, prefix lengths, mask words.

The torch reference is `drafters.specblock.draft_attention.DraftAttentionBuilder`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl


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
    row: torch.Tensor,
    position: torch.Tensor,
    valid: torch.Tensor,
    stands: torch.Tensor,
    index: torch.Tensor,
    last: torch.Tensor,
    own: torch.Tensor,
    block_table: torch.Tensor,
    prefix: torch.Tensor,
    bits: torch.Tensor,
    reach: torch.Tensor | None,
    block: int,
    token_block: int,
    max_position: int,
) -> LaterBlockMetadata:
    """Launch the kernel of block `block` ≥ 2; it also writes rows of `prefix`, `bits`, `reach`.

    Args:
        row, position: [R, S] int64, of the starts, in earlier rows.
        valid: [R, S] bool, likewise.
        stands, index: [T] int64, `position` and `index` of the step's committed rows.
        last: [R] int64, the drafting row among those.
        own: [rows, K, W] int64 contiguous, the bits up to each position of a row.
        block_table: [R, max blocks] int32.
        prefix: [R, rows] int64 contiguous, visible prefix entries of a row; row 0 is not read.
        bits: [R, rows, W] int64 contiguous, visible entries after these; likewise.
        reach: [R, rows] int64 contiguous, tokens drafted before a row, likewise; None: RoPE does
            not count them.
        token_block: tokens in one block of the table.
        max_position: positions at or beyond it have no slot.
    """
    (requests, starts), (rows, block_size, num_words) = row.shape, own.shape
    cells = requests * starts * block_size

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=row.device)

    metadata = LaterBlockMetadata(
        kv_index=empty(requests * starts, block_size, dtype=torch.int64),
        query_start=empty(requests + 1),
        prefix_len=empty(cells),
        mask_words=empty(cells, num_words, dtype=torch.int64),
        seq_len=empty(requests),
        tree_start=empty(requests),
        valid=empty(requests, starts, dtype=torch.bool),
        source=empty(requests * starts, dtype=torch.int64),
        base=empty(requests * starts, dtype=torch.int64),
    )
    places = next_power_of_2(starts * block_size)
    given = StartPointers(row.contiguous(), position.contiguous(), valid.contiguous())
    _later_block_metadata_kernel[(requests + 1,)](
        given,
        CommittedRows(stands, index, last),
        CommittedRows(stands.stride(0), index.stride(0), last.stride(0)),
        own,
        block_table,
        block_table.stride(0),
        RowPointers(prefix, bits, reach),
        metadata,
        requests,
        block_table.shape[1],
        1 + (block - 2) * starts,
        max_position,
        ROWS=rows,
        S=starts,
        K=block_size,
        W=num_words,
        TOKENS=token_block,
        PLACES=places,
        num_warps=1 if places <= 64 else 4,
    )
    return metadata


class StartPointers(NamedTuple):
    """Starts of a block; contiguous."""

    row: torch.Tensor  # [R, S] int64
    position: torch.Tensor  # [R, S] int64
    valid: torch.Tensor  # [R, S] bool


class CommittedRows(NamedTuple):
    """The step's committed rows, or the strides of these tensors."""

    position: Any  # [T] int64
    index: Any  # [T] int64
    last: Any  # [R] int64


class RowPointers(NamedTuple):
    """Stored values of rows; contiguous."""

    prefix: torch.Tensor  # [R, ROWS] int64
    bits: torch.Tensor  # [R, ROWS, W] int64
    reach: torch.Tensor | None  # [R, ROWS] int64


@jit(do_not_specialize=["num_requests", "table_width", "first_row"])
def _later_block_metadata_kernel(
    starts,  # StartPointers
    committed,  # CommittedRows
    strides,  # CommittedRows
    own_ptr,  # [ROWS, K, W] int64
    block_table_ptr,  # [R, table_width] int32
    table_stride,
    kept,  # RowPointers
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
    PLACES: tl.constexpr,  # >= S · K
):
    """Handle the S·K positions of one request; one more program ends `query_start`."""
    request = tl.program_id(0)
    tl.store(out.query_start + request, request * (S * K))
    if request >= num_requests:
        return
    drafts_from = tl.load(committed.last + request * strides.last)
    rope = tl.load(committed.position + drafts_from * strides.position)
    newest = tl.load(committed.index + drafts_from * strides.index)
    longest = max_position - (rope - newest)  # in places of the block table
    ends = (newest + 1) * K
    tl.store(out.tree_start + request, ends.to(tl.int32))
    limit = tl.minimum(ends + (first_row - 1 + S) * K, longest * K)
    tl.store(out.seq_len + request, limit.to(tl.int32))

    place = tl.arange(0, PLACES)
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
    goes_on = (request * first_row + from_row) * K + from_k
    tl.store(out.source + of_start, goes_on, mask=once)
    ahead = rope + 1
    if kept.reach is not None:
        longer = tl.load(kept.reach + request * ROWS + from_row, mask=drafted, other=0) + from_k + 1
        tl.store(kept.reach + request * ROWS + first_row + start, longer, mask=once)
        ahead += longer
    tl.store(out.base + of_start, ahead, mask=once)
    for w in range(W):
        path = tl.load(kept.bits + (request * ROWS + from_row) * W + w, mask=drafted, other=0)
        path |= tl.load(own_ptr + (from_row * K + from_k) * W + w, mask=inside, other=0)
        tl.store(kept.bits + (request * ROWS + first_row + start) * W + w, path, mask=once)
        mine = tl.load(own_ptr + ((first_row + start) * K + k) * W + w, mask=inside, other=0)
        tl.store(out.mask_words + cell * W + w, path | mine, mask=inside)

    at = newest + first_row + start  # the place to borrow
    real = at < longest
    column = tl.minimum(at // TOKENS, table_width - 1)
    borrowed = block_table_ptr + request.to(tl.int64) * table_stride + column
    kv_slot = tl.load(borrowed, mask=inside & real, other=-1).to(tl.int64) * TOKENS
    kv_slot = tl.where(real, kv_slot + at % TOKENS, -1)
    tl.store(out.kv_index + cell, tl.where(kv_slot >= 0, kv_slot * K, -K) + k, mask=inside)
    counts = tl.load(starts.valid + of_start, mask=once, other=0) != 0
    tl.store(out.valid + of_start, real & counts, mask=once)
