"""RoPE of queries and keys, half-split over the whole head, with Qwen3's norms, in one launch.

The kernel computes its angles, since tables would take four launches. It writes new tensors, since
threads of a small tile hold duplicates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..optional_triton import cdiv, jit, next_power_of_2, tl


class Rope(NamedTuple):
    """Rotation of T rows of K positions: position k of row t by (base[t] + k) · turn.

    Attributes:
        base: [T] int64.
        turn: [D] float32, radians per position; the first half are the second half's negatives,
            since sin is odd and cos even: the minus of the rotation sits in sin.
        table: cos and sin of the angles, each [T, K, 1, D]; None: the kernel rotates.
    """

    base: torch.Tensor
    turn: torch.Tensor
    table: tuple[torch.Tensor, torch.Tensor] | None


Norms = tuple[nn.RMSNorm, nn.RMSNorm]
"""Over D, of one epsilon: of the queries' heads, and of the keys'."""


def rotate_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    rope: Rope,
    keep: torch.Tensor | None = None,
    norms: Norms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, optionally normed per head, rotated to their positions.

    Args:
        query: [Q, ..., heads, D], or [T, ..., heads, D], of all rows.
        key: [T, ..., kv heads, D], all of one dtype.
        rope: T·K positions; with a table torch runs (differentiable), without one the kernel.
        keep: [Q] int64, rows of the returned queries; None: all, and Q = T.
        norms: Qwen3's.
    """
    if rope.table is None:
        return rotate_pair_triton(query, key, rope, keep, norms)
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    # The cast only matters under autocast.
    cos, sin = (x.to(key.dtype).view(*key.shape[:-2], 1, key.shape[-1]) for x in rope.table)
    key = _rotate(key, cos, sin)
    if keep is not None:
        cos, sin = cos[keep], sin[keep]
        query = query[keep] if len(query) == len(key) else query
    return _rotate(query, cos, sin), key


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [..., heads, D] by cos and signed sin [..., 1, D]."""
    swapped = states.roll(states.shape[-1] // 2, -1)
    return torch.addcmul(states * cos, swapped, sin)


def rotate_pair_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    rope: Rope,
    keep: torch.Tensor | None = None,
    norms: Norms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in `rotate_pair`, with any strides."""
    picks = keep is not None and len(query) == len(key)
    kept = len(query) if keep is None else len(keep)
    query_out, key_out = query.new_empty(kept, *query.shape[1:]), key.new_empty(key.shape)
    # Views of the joint projection of queries, keys and values.
    query, key = query.flatten(0, -3), key.flatten(0, -3)
    (_, query_heads, size), (keys, key_heads, _) = query.shape, key.shape
    queries = query_out.shape[:-2].numel()
    half_places = next_power_of_2(size // 2)
    heads = min(next_power_of_2(max(query_heads, key_heads)), max(1, 1024 // half_places))
    query_tiles = cdiv(query_heads, heads)
    query_norm, key_norm = (None, None) if norms is None else (norm.weight for norm in norms)
    if keys:
        _rotate_pair_kernel[(max(queries, keys), query_tiles + cdiv(key_heads, heads))](
            query,
            query.stride(),
            query_out,
            queries,
            key,
            key.stride(),
            key_out,
            keys,
            rope.base,
            rope.base.stride(0),
            rope.turn,
            keep,
            0 if keep is None else keep.stride(0),
            query_norm,
            key_norm,
            0.0 if norms is None else norms[0].eps,
            RopeConstants(
                EACH=keys // len(rope.base),
                PICKS=picks,
                QUERY_HEADS=query_heads,
                KEY_HEADS=key_heads,
                HALF=size // 2,
                QUERY_TILES=query_tiles,
                HEADS=heads,
                HALF_PLACES=half_places,
            ),
            num_warps=4,
        )
    return query_out, key_out


class RopeConstants(NamedTuple):
    """Compile-time constants."""

    EACH: int  # K, positions of a row
    PICKS: bool  # queries are of all rows
    QUERY_HEADS: int
    KEY_HEADS: int
    HALF: int
    QUERY_TILES: int
    HEADS: int  # of a tile
    HALF_PLACES: int  # >= HALF


# Positions may be a slice: do not specialise on alignment.
@jit(do_not_specialize=["queries", "keys", "base_ptr", "base_stride", "keep_stride"])
def _rotate_pair_kernel(
    query_ptr,  # [queries, QUERY_HEADS, 2 HALF], or of all rows
    query_strides,
    query_out_ptr,  # contiguous
    queries,
    key_ptr,  # [keys, KEY_HEADS, 2 HALF]
    key_strides,
    key_out_ptr,  # contiguous
    keys,
    base_ptr,  # [keys / EACH] int64
    base_stride,
    turn_ptr,  # [2 HALF] fp32
    keep_ptr,  # [queries / EACH] int64; or None
    keep_stride,
    query_norm_ptr,  # [2 HALF]; or None
    key_norm_ptr,  # [2 HALF]; or None
    eps,
    ROPE: tl.constexpr,  # RopeConstants
):
    """Rotate some heads of one position: first its query's tiles, then its key's."""
    at, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asks = tile < ROPE.QUERY_TILES
    if at < tl.where(asks, queries, keys):
        row = at // ROPE.EACH
        if keep_ptr is not None:
            row = tl.load(keep_ptr + row * keep_stride, mask=asks, other=row).to(tl.int64)
        position = tl.load(base_ptr + row * base_stride) + at % ROPE.EACH
        column = tl.arange(0, ROPE.HALF_PLACES)
        frequency = tl.load(turn_ptr + ROPE.HALF + column, mask=column < ROPE.HALF, other=0.0)
        angle = position.to(tl.float32) * frequency
        turned = tl.cos(angle), tl.sin(angle)
        if asks:
            source = row * ROPE.EACH + at % ROPE.EACH if ROPE.PICKS else at
            state, out = query_ptr + source * query_strides[0], query_out_ptr
            out += at * (ROPE.QUERY_HEADS * 2 * ROPE.HALF)
            head = tile * ROPE.HEADS
            _rotate_tile(
                state, query_strides, out, head, turned, query_norm_ptr, eps, ROPE.QUERY_HEADS, ROPE
            )
        else:
            state, out = key_ptr + at * key_strides[0], key_out_ptr
            out += at * (ROPE.KEY_HEADS * 2 * ROPE.HALF)
            head = (tile - ROPE.QUERY_TILES) * ROPE.HEADS
            _rotate_tile(
                state, key_strides, out, head, turned, key_norm_ptr, eps, ROPE.KEY_HEADS, ROPE
            )


@jit
def _rotate_tile(
    states_ptr,  # [ALL_HEADS, 2 HALF], of one position
    strides,
    out_ptr,  # contiguous
    first_head,
    turned,  # cosine and sine, each [HALF_PLACES] fp32
    norm_ptr,  # [2 HALF]; or None
    eps,
    ALL_HEADS: tl.constexpr,
    ROPE: tl.constexpr,  # RopeConstants
):
    head, column = (
        first_head + tl.arange(0, ROPE.HEADS)[:, None],
        tl.arange(0, ROPE.HALF_PLACES)[None, :],
    )
    within = column < ROPE.HALF
    inside = (head < ALL_HEADS) & within
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    states_ptr += head * strides[1] + column * strides[2]
    left = tl.load(states_ptr, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(states_ptr + ROPE.HALF * strides[2], mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        square = tl.sum(left * left + right * right, 1) / (2 * ROPE.HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        left = left * scale * tl.load(norm_ptr + column, mask=within, other=0.0).to(tl.float32)
        right = (
            right
            * scale
            * tl.load(norm_ptr + ROPE.HALF + column, mask=within, other=0.0).to(tl.float32)
        )
        left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
    cos = turned[0].to(dtype).to(tl.float32)[None, :]
    sin = turned[1].to(dtype).to(tl.float32)[None, :]
    # Rounded between the two products, as in torch and in training.
    kept = (left * cos).to(dtype).to(tl.float32) - right * sin
    other = (right * cos).to(dtype).to(tl.float32) + left * sin
    out_ptr += head * (2 * ROPE.HALF) + column
    tl.store(out_ptr, kept.to(dtype), mask=inside)
    tl.store(out_ptr + ROPE.HALF, other.to(dtype), mask=inside)
