"""Attention metadata of a drafter's first block: KV indices, prefix lengths, RoPE positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..op import op
from ..optional_triton import cdiv, jit, tl

_CELLS = 256  # of a program


class FirstBlockMetadata(NamedTuple):
    """Block 1: T rows of K positions, of R requests."""

    kv_index: torch.Tensor  # [T, K] int64, negative for padding
    prefix_len: torch.Tensor  # [T·K] int32
    base: torch.Tensor  # [T] int64, RoPE's position of each row's first
    query_start: torch.Tensor  # [R+1] int32
    ends: torch.Tensor  # [R] int32, entries up to and with the newest row's
    kept_start: torch.Tensor  # [R+1] int32, of the newest rows alone
    kept_prefix: torch.Tensor  # [R·K] int32


def first_block_metadata_triton(rows: Any, block_size: int) -> FirstBlockMetadata:
    """Launch the kernel; arguments as `first_block_metadata` has them."""
    num_rows, requests, K = len(rows.position), len(rows.last), block_size

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.position.device)

    made = FirstBlockMetadata(
        empty(num_rows, K, dtype=torch.int64),
        empty(num_rows * K),
        empty(num_rows, dtype=torch.int64),
        *(empty(size) for size in (requests + 1, requests, requests + 1, requests * K)),
    )
    given = rows.position, rows.index, rows.kv_slot, rows.row_start, rows.last
    most = max(num_rows * K, requests * K, requests + 1)
    _first_block_metadata_kernel[(cdiv(most, _CELLS),)](
        *(x.contiguous() for x in given), made, num_rows, requests, K=K
    )
    return made


@op(first_block_metadata_triton)
def first_block_metadata(rows: Any, block_size: int) -> FirstBlockMetadata:
    """Return the metadata of `CommittedTokens`; block_size: K."""
    K, last, device = block_size, rows.last, rows.position.device
    k = torch.arange(K, device=device)
    see = (rows.index[:, None] * K + k + 1).int()  # [T, K]
    return FirstBlockMetadata(
        kv_index=torch.where(rows.kv_slot >= 0, rows.kv_slot * K, -K)[:, None] + k,
        prefix_len=see.flatten(),
        base=rows.position + 1,
        query_start=rows.row_start * K,
        ends=((rows.index[last] + 1) * K).int(),
        kept_start=torch.arange(0, len(last) * K + 1, K, dtype=torch.int32, device=device),
        kept_prefix=see[last].flatten(),
    )


# A part of a long prompt begins anywhere: the alignment of its tensors is not to be compiled for.
@jit(do_not_specialize=["position_ptr", "index_ptr", "kv_slot_ptr", "row_start_ptr", "last_ptr",
                        "num_rows", "num_requests"])  # fmt: skip
def _first_block_metadata_kernel(
    position_ptr,  # [T] int64
    index_ptr,  # [T] int64
    kv_slot_ptr,  # [T] int64
    row_start_ptr,  # [R+1] int32
    last_ptr,  # [R] int64
    out,  # FirstBlockMetadata
    num_rows,  # T
    num_requests,  # R
    K: tl.constexpr,
    CELLS: tl.constexpr = _CELLS,
):
    """Handle CELLS positions of rows, of newest rows, and of requests."""
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    one, k = cell // K, cell % K
    inside = one < num_rows
    slot = tl.load(kv_slot_ptr + one, mask=inside, other=-1)
    tl.store(out.kv_index + cell, tl.where(slot >= 0, slot * K, -K) + k, mask=inside)
    entry = tl.load(index_ptr + one, mask=inside, other=0) * K
    tl.store(out.prefix_len + cell, (entry + k + 1).to(tl.int32), mask=inside)
    base = tl.load(position_ptr + one, mask=inside, other=0) + 1
    tl.store(out.base + one, base, mask=inside & (k == 0))

    inside = one < num_requests
    newest = tl.load(last_ptr + one, mask=inside, other=0)
    entry = tl.load(index_ptr + newest, mask=inside, other=0) * K
    tl.store(out.kept_prefix + cell, (entry + k + 1).to(tl.int32), mask=inside)
    tl.store(out.ends + one, (entry + K).to(tl.int32), mask=inside & (k == 0))
    inside = cell <= num_requests
    start = tl.load(row_start_ptr + cell, mask=inside, other=0)
    tl.store(out.query_start + cell, start * K, mask=inside)
    tl.store(out.kept_start + cell, cell * K, mask=inside)
