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
    """Rotation of T rows of K positions: position k of row t by (base[t] + k) · turn."""

    base: torch.Tensor  # [T] int64
    # [D] float32, radians per position; the first half are the second half's negatives, since sin
    # is odd and cos even: the minus of the rotation sits in sin.
    turn: torch.Tensor
    # cos and sin of the angles, each [T, K, 1, D]; None: the kernel rotates.
    table: tuple[torch.Tensor, torch.Tensor] | None


def rotate_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    rope: Rope,
    keep: torch.Tensor | None = None,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, optionally normed per head, rotated to their positions.

    Args:
        query: [Q, ..., heads, D].
        key: [T, ..., kv heads, D], all of one dtype.
        rope: T·K positions; with a table torch runs (differentiable), without one the kernel.
        keep: [Q] int64, rows of the queries; None: all, and Q = T.
        norms: Qwen3's over D, of the queries and of the keys, with one epsilon; None: none.
    """
    query_norm, key_norm = norms or (None, None)
    if rope.table is not None:
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        # The cast only matters under autocast.
        cos, sin = (x.to(key.dtype).view(*key.shape[:-2], 1, key.shape[-1]) for x in rope.table)
        key = _rotate(key, cos, sin)
        if keep is not None:
            cos, sin = cos[keep], sin[keep]
        return _rotate(query, cos, sin), key
    asked, seen = HeadStates.of(query, query_norm), HeadStates.of(key, key_norm)
    queries, keys, half = len(asked.source), len(seen.source), query.shape[-1] // 2
    fits = max(1, 1024 // next_power_of_2(half))
    heads = min(next_power_of_2(max(asked.heads, seen.heads)), fits)
    query_tiles = cdiv(asked.heads, heads)
    if keys:
        _rotate_pair_kernel[(max(queries, keys), query_tiles + cdiv(seen.heads, heads))](
            asked,
            queries,
            seen,
            keys,
            rope.base,
            rope.base.stride(0),
            rope.turn,
            keep,
            0 if keep is None else keep.stride(0),
            0.0 if key_norm is None else key_norm.eps,
            RopeConstants(keys // len(rope.base), half, query_tiles, heads),
        )
    return asked.out, seen.out


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [..., heads, D] by cos and signed sin [..., 1, D]."""
    swapped = states.roll(states.shape[-1] // 2, -1)
    return torch.addcmul(states * cos, swapped, sin)


class HeadStates(NamedTuple):
    """Queries or keys."""

    source: torch.Tensor  # [rows · K, heads, D]
    row_stride: int
    head_stride: int
    out: torch.Tensor  # contiguous
    norm: torch.Tensor | None  # [D]
    heads: int

    @classmethod
    def of(cls, states: torch.Tensor, norm: nn.RMSNorm | None) -> HeadStates:
        """states: [..., heads, D], such as a view of the joint projection of queries and keys.

        Elements of a head are consecutive.
        """
        flat, weight = states.flatten(0, -3), None if norm is None else norm.weight
        (row, head, _), out = flat.stride(), states.new_empty(states.shape)
        return cls(flat, row, head, out, weight, flat.shape[1])


class RopeConstants(NamedTuple):
    """Compile-time constants."""

    EACH: int  # K, positions of a row
    HALF: int  # D / 2
    QUERY_TILES: int
    HEADS: int  # of a tile


# Positions may be a slice: do not specialise on alignment.
@jit(do_not_specialize=["queries", "keys", "base_ptr", "base_stride", "keep_stride"])
def _rotate_pair_kernel(
    query,  # HeadStates
    queries,  # rows · K of the result
    key,  # HeadStates
    keys,
    base_ptr,  # [keys / EACH] int64
    base_stride,
    turn_ptr,  # [2 HALF] fp32
    keep_ptr,  # [queries / EACH] int64; or None
    keep_stride,
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
        column = tl.arange(0, next_power_of_2(ROPE.HALF))
        frequency = tl.load(turn_ptr + ROPE.HALF + column, mask=column < ROPE.HALF, other=0.0)
        angle = position.to(tl.float32) * frequency
        if asks:
            _rotate_tile(query, at, tile, angle, eps, ROPE)
        else:
            _rotate_tile(key, at, tile - ROPE.QUERY_TILES, angle, eps, ROPE)


@jit
def _rotate_tile(
    of,  # HeadStates
    at,  # the position
    tile,
    angle,  # [≥ HALF] fp32
    eps,
    ROPE: tl.constexpr,  # RopeConstants
):
    head = tile * ROPE.HEADS + tl.arange(0, ROPE.HEADS)[:, None]
    column = tl.arange(0, next_power_of_2(ROPE.HALF))[None, :]
    within = column < ROPE.HALF
    inside = (head < of.heads) & within
    dtype: tl.constexpr = of.out.dtype.element_ty
    source_ptr = of.source + at * of.row_stride + head * of.head_stride + column
    left = tl.load(source_ptr, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source_ptr + ROPE.HALF, mask=inside, other=0.0).to(tl.float32)
    if of.norm is not None:
        square = tl.sum(left * left + right * right, 1) / (2 * ROPE.HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        gain = tl.load(of.norm + column, mask=within, other=0.0).to(tl.float32)
        left = (left * scale * gain).to(dtype).to(tl.float32)
        gain = tl.load(of.norm + ROPE.HALF + column, mask=within, other=0.0).to(tl.float32)
        right = (right * scale * gain).to(dtype).to(tl.float32)
    cos = tl.cos(angle).to(dtype).to(tl.float32)[None, :]
    sin = tl.sin(angle).to(dtype).to(tl.float32)[None, :]
    # Rounded between the two products, as in torch and in training.
    kept = (left * cos).to(dtype).to(tl.float32) - right * sin
    other = (right * cos).to(dtype).to(tl.float32) + left * sin
    out_ptr = of.out + (at * of.heads + head) * (2 * ROPE.HALF) + column
    tl.store(out_ptr, kept.to(dtype), mask=inside)
    tl.store(out_ptr + ROPE.HALF, other.to(dtype), mask=inside)
