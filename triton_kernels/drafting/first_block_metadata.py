"""Attention metadata of a drafter's first block: KV indices, prefix lengths, RoPE positions.

The torch reference is `vllm_specblock.drafters.specblock.draft_attention.DraftAttentionBuilder`,
which also says what it means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import cdiv, jit, tl

_CELLS = 256  # positions that a program looks at


class FirstBlockMetadata(NamedTuple):
    """Block 1: T rows of K positions, of R requests, W words of bits."""

    kv_index: torch.Tensor  # [T, K] int64, negative for padding
    query_start: torch.Tensor  # [R+1] int32
    prefix_len: torch.Tensor  # [T·K] int32
    mask_words: torch.Tensor  # [T·K, W] int64, no bit set
    ends: torch.Tensor  # [R] int32, entries up to and with the newest row's
    kept_start: torch.Tensor  # [R+1] int32, of the newest rows alone
    kept_prefix: torch.Tensor  # [R·K] int32
    base: torch.Tensor  # [T] int64, RoPE's position of each row's first

    @classmethod
    def room(
        cls, rows: int, requests: int, block_size: int, num_words: int, device: torch.device
    ) -> FirstBlockMetadata:
        """Tensors of T rows and R requests to be written to; block_size: K, num_words: W."""
        cells = rows * block_size

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            kv_index=empty(rows, block_size, dtype=torch.int64),
            query_start=empty(requests + 1),
            prefix_len=empty(cells),
            mask_words=empty(cells, num_words, dtype=torch.int64),
            ends=empty(requests),
            kept_start=empty(requests + 1),
            kept_prefix=empty(requests * block_size),
            base=empty(rows, dtype=torch.int64),
        )


def first_block_metadata_triton(
    position: torch.Tensor,
    index: torch.Tensor,
    kv_slot: torch.Tensor,
    row_start: torch.Tensor,
    last: torch.Tensor,
    block_size: int,
    num_words: int,
) -> FirstBlockMetadata:
    """Launch the kernel of block 1.

    Args:
        position, index, kv_slot, row_start, last: as `CommittedTokens` has them.
        block_size: K.
        num_words: W.
    """
    rows, requests, device = len(position), len(last), position.device
    cells = rows * block_size

    metadata = FirstBlockMetadata.room(rows, requests, block_size, num_words, device)
    most = max(cells, requests * block_size, requests + 1)
    _first_block_metadata_kernel[(cdiv(most, _CELLS),)](
        position,
        position.stride(0),
        index,
        index.stride(0),
        kv_slot,
        kv_slot.stride(0),
        row_start,
        row_start.stride(0),
        last,
        last.stride(0),
        metadata,
        rows,
        requests,
        K=block_size,
        W=num_words,
        CELLS=_CELLS,
        num_warps=4,
    )
    return metadata


# A part of a long prompt begins anywhere: the alignment of its tensors is not to be compiled for.
@jit(
    do_not_specialize=[
        "position", "index", "kv_slot", "row_start", "last", "num_rows", "num_requests"
    ]
)  # fmt: skip
def _first_block_metadata_kernel(
    position,  # [T] int64
    position_stride,
    index,  # [T] int64
    index_stride,
    kv_slot,  # [T] int64
    kv_slot_stride,
    row_start,  # [R+1] int32
    row_stride,
    last,  # [R] int64
    last_stride,
    out,  # FirstBlockMetadata
    num_rows,  # T
    num_requests,  # R
    K: tl.constexpr,
    W: tl.constexpr,
    CELLS: tl.constexpr,
):
    """CELLS positions of rows, as many of newest rows, and as many requests."""
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    one, k = cell // K, cell % K
    inside = one < num_rows
    at = tl.load(kv_slot + one * kv_slot_stride, mask=inside, other=-1)
    tl.store(out.kv_index + cell, tl.where(at >= 0, at * K, -K) + k, mask=inside)
    stands = tl.load(index + one * index_stride, mask=inside, other=0)
    tl.store(out.prefix_len + cell, (stands * K + k + 1).to(tl.int32), mask=inside)
    rope = tl.load(position + one * position_stride, mask=inside, other=0)
    tl.store(out.base + one, rope + 1, mask=inside & (k == 0))
    for w in range(W):
        tl.store(out.mask_words + cell * W + w, tl.full([CELLS], 0, tl.int64), mask=inside)

    inside = one < num_requests
    newest = tl.load(last + one * last_stride, mask=inside, other=0)
    stands = tl.load(index + newest * index_stride, mask=inside, other=0)
    tl.store(out.kept_prefix + cell, (stands * K + k + 1).to(tl.int32), mask=inside)
    tl.store(out.ends + one, ((stands + 1) * K).to(tl.int32), mask=inside & (k == 0))
    start = tl.load(row_start + cell * row_stride, mask=cell <= num_requests, other=0)
    tl.store(out.query_start + cell, start * K, mask=cell <= num_requests)
    tl.store(out.kept_start + cell, cell * K, mask=cell <= num_requests)
