"""Split-KV reduction of tree attention: number of splits, merge, epilogue.

A state is (top, total, acc): the largest score, in units of log 2 (8 less for float8 queries), the
sum of the exponentials relative to it, and the values weighted by them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, tl

REDUCE_ROWS = 16  # the second kernel is short: many small programs hide its reads


class OutPointers(NamedTuple):
    """Output, value scale and sinks."""

    out: torch.Tensor  # [T, nh, D]
    value_scale: torch.Tensor | None  # [] fp32
    sinks: torch.Tensor | None  # [nh]


class RowStrides(NamedTuple):
    """Strides of queries or outputs [T, nh, D]."""

    token: int
    head: int
    dim: int


class TileConstants(NamedTuple):
    """Compile-time constants of both kernels."""

    KV_HEADS: int
    GROUP: int  # query heads per kv head
    HEAD: int  # D of the values
    ROPE: int  # D of the keys beyond it, if values are the beginning of keys; 0: they are not
    BLOCK_M: int
    BLOCK_D: int
    BLOCK_ROPE: int
    PROGRAMS: int
    MAX_SPLITS: int
    SPLIT_ENTRIES: int


@jit
def _count_splits(
    bound,  # entries of the request
    tiles,  # of the request
    TILE: tl.constexpr,  # TileConstants
):
    """Return the splits of a request: enough to fill the GPU, none too short."""
    most = tl.minimum(TILE.PROGRAMS // (TILE.KV_HEADS * tl.maximum(tiles, 1)), TILE.MAX_SPLITS)
    splits = tl.minimum((bound + TILE.SPLIT_ENTRIES - 1) // TILE.SPLIT_ENTRIES, most)
    return tl.maximum(splits, 1)


@jit
def _in_other_form(query_start, whole_from, WHOLE: tl.constexpr):
    """Return whether the launch in the other form serves the batch.

    With `whole_from` or more requests, one program reads all splits (WHOLE). Missing requests come
    last, without rows.
    """
    many = tl.load(query_start + whole_from) > tl.load(query_start + whole_from - 1)
    return many != WHOLE


@jit
def empty_state(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The state of no entries."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return (top, tl.full([ROWS], 0.0, tl.float32), tl.full([ROWS, DIMS], 0.0, tl.float32))


@jit
def _merge_splits(state, part):
    """Add the state of one split to that of the previous ones.

    Both kernels must give the same bits: hence explicit fused operations, which leave the compiler
    no choice.
    """
    top = tl.maximum(state[0], part[0])
    base = tl.where(top == float("-inf"), 0.0, top)
    decay, weight = tl.exp2(state[0] - base), tl.exp2(part[0] - base)
    total = tl.fma(state[1], decay, part[1] * weight)
    decay = decay[:, None].broadcast_to(state[2].shape)
    return (top, total, tl.fma(state[2], decay, part[2] * weight[:, None]))


@jit
def _finish(
    state,
    token,  # [rows] int64
    head,  # [rows]
    row_in,  # [rows]
    into,  # OutPointers
    strides,  # RowStrides
    TILE: tl.constexpr,  # TileConstants
):
    """Write the rows of a tile from their state."""
    m_i, l_i, acc = state
    dim = tl.arange(0, TILE.BLOCK_D)
    if into.sinks is not None:  # an extra score with value zero
        sink = tl.load(into.sinks + head, mask=row_in, other=0.0).to(tl.float32)
        sink *= 1.4426950408889634
        m_new = tl.maximum(m_i, sink)
        decay = tl.exp2(m_i - m_new)
        l_i = l_i * decay + tl.exp2(sink - m_new)
        acc = acc * decay[:, None]
    result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    if into.value_scale is not None:
        result = result * tl.load(into.value_scale)
    tl.store(
        (into.out + token * strides.token + head * strides.head)[:, None]
        + dim[None, :] * strides.dim,
        result.to(into.out.dtype.element_ty),
        mask=row_in[:, None] & (dim < TILE.HEAD)[None, :],
    )


@jit(do_not_specialize=["max_seq_len", "slots"])
def _merge_splits_kernel(
    query_start_ptr,  # [R+1] int32
    seq_len_ptr,  # [R] int32
    into,  # OutPointers
    partial_ptr,  # [R, nkv, slots, BLOCK_M, BLOCK_D] fp32
    stats_ptr,  # [R, nkv, slots, 2, BLOCK_M] fp32
    max_seq_len,
    above,
    up_to,
    whole_from,
    slots,
    strides,  # RowStrides
    TILE: tl.constexpr,  # TileConstants
    REDUCE_ROWS: tl.constexpr = REDUCE_ROWS,
):
    """REDUCE_ROWS rows of one request and one kv head: all their splits, in order."""
    request = tl.program_id(1)
    kv_head = tl.program_id(2)
    first_token = tl.load(query_start_ptr + request)
    num_rows = (tl.load(query_start_ptr + request + 1) - first_token) * TILE.GROUP
    row = tl.program_id(0) * REDUCE_ROWS + tl.arange(0, REDUCE_ROWS)
    if (num_rows <= above) | (num_rows > up_to) | (tl.program_id(0) * REDUCE_ROWS >= num_rows):
        return
    if whole_from is not None:  # noqa: SIM102 (known to the compiler, which the other is not)
        if _in_other_form(query_start_ptr, whole_from, False):
            return
    tiles = (num_rows + TILE.BLOCK_M - 1) // TILE.BLOCK_M
    bound = tl.minimum(tl.load(seq_len_ptr + request), max_seq_len)
    splits = _count_splits(bound, tiles, TILE)
    if splits == 1:  # written already
        return
    dim = tl.arange(0, TILE.BLOCK_D)
    lane = row % TILE.BLOCK_M
    state = empty_state(REDUCE_ROWS, TILE.BLOCK_D)
    place = (request * TILE.KV_HEADS + kv_head).to(tl.int64) * slots + row // TILE.BLOCK_M
    # Each split is read while the previous one is merged.
    for _ in tl.range(0, splits, num_stages=3):
        part_m_i = tl.load(stats_ptr + place * 2 * TILE.BLOCK_M + lane)
        part_l_i = tl.load(stats_ptr + place * 2 * TILE.BLOCK_M + TILE.BLOCK_M + lane)
        part = tl.load(
            partial_ptr + ((place * TILE.BLOCK_M + lane) * TILE.BLOCK_D)[:, None] + dim[None, :]
        )
        state = _merge_splits(state, (part_m_i, part_l_i, part))
        place += tiles
    _finish(
        state,
        (first_token + row // TILE.GROUP).to(tl.int64),
        kv_head * TILE.GROUP + row % TILE.GROUP,
        row < num_rows,
        into,
        strides,
        TILE,
    )
