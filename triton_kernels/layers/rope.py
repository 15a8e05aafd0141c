"""RoPE of queries and keys, half-split over the whole head, in one launch with all that it needs.

The kernel works its angles out: tables of cosines would be four launches. Qwen3's norms of queries
and keys are in it, too. The results are new tensors: in place, threads that hold the same numbers
twice, as those of a small tile do, could read what others have rotated already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..optional_triton import cdiv, jit, next_power_of_2, tl
from .layers_numba import rotate_pair_numba


class Rope(NamedTuple):
    """By what T rows of K positions are turned: position k of row t by (base[t] + k) · turn.

    Attributes:
        base: [T] int64.
        turn: [D] float32, radians per position; the first half are the second half's negatives,
            since sin is odd and cos even: the minus of the rotation sits in sin.
        table: cos and sin of the angles, each [T, K, 1, D]; None where a kernel or a loop rotates.
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
    """Queries and keys, normed per head if they are to be, each turned to its position.

    Args:
        query: [Q, ..., heads, D].
        key: [T, ..., kv heads, D], all of one dtype.
        rope: T·K positions in all; with a table the reference runs, without one the kernel, or on a
            CPU a loop.
        keep: [Q] int64, whose queries they are of T rows; None: everybody's, and Q = T.
        norms: those of Qwen3.
    """
    if rope.table is not None:
        return rotate_pair_reference(query, key, rope, keep, norms)
    if key.is_cuda:
        return rotate_pair_triton(query, key, rope, keep, norms)
    return rotate_pair_numba(query, key, rope.base, rope.turn, keep, norms)


def rotate_pair_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    rope: Rope,
    keep: torch.Tensor | None = None,
    norms: Norms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `rotate_pair` has them; differentiable."""
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    assert rope.table is not None  # else a kernel or a loop would rotate
    # The cast only matters under autocast.
    cos, sin = (x.to(key.dtype).view(*key.shape[:-2], 1, key.shape[-1]) for x in rope.table)
    key = _rotate(key, cos, sin)
    if keep is not None:
        cos, sin = cos[keep], sin[keep]
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
    """Launch the kernel; arguments as `rotate_pair` has them, of any strides."""
    query_out, key_out = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)
    )
    # Views, of what a product leaves for queries, keys and values together.
    query, key = query.flatten(0, -3), key.flatten(0, -3)
    (queries, query_heads, size), (keys, key_heads, _) = query.shape, key.shape
    half_places = next_power_of_2(size // 2)
    heads = min(next_power_of_2(max(query_heads, key_heads)), max(1, 1024 // half_places))
    query_tiles = cdiv(query_heads, heads)
    query_norm, key_norm = (None, None) if norms is None else (norm.weight for norm in norms)
    if keys:
        _rotate_pair_kernel[(max(queries, keys), query_tiles + cdiv(key_heads, heads))](
            query,
            *query.stride(),
            query_out,
            queries,
            key,
            *key.stride(),
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
            EACH=keys // len(rope.base),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            HALF=size // 2,
            QUERY_TILES=query_tiles,
            HEADS=heads,
            HALF_PLACES=half_places,
            num_warps=4,
        )
    return query_out, key_out


# Positions may be a part of a step's, which begins anywhere.
@jit(do_not_specialize=["queries", "keys", "base", "base_stride", "keep_stride"])
def _rotate_pair_kernel(
    query,  # [queries, QUERY_HEADS, 2 HALF]
    query_row,
    query_head,
    query_dim,
    query_out,  # contiguous
    queries,
    key,  # [keys, KEY_HEADS, 2 HALF]
    key_row,
    key_head,
    key_dim,
    key_out,  # contiguous
    keys,
    base,  # [keys / EACH] int64
    base_stride,
    turn,  # [2 HALF] fp32
    keep,  # [queries / EACH] int64; or None
    keep_stride,
    query_norm,  # [2 HALF]; or None
    key_norm,  # [2 HALF]; or None
    eps,
    EACH: tl.constexpr,  # K, positions of a row
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    HEADS: tl.constexpr,  # of a tile
    HALF_PLACES: tl.constexpr,
):
    """Some heads of one position: first the tiles of its query, then those of its key."""
    at, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asks = tile < QUERY_TILES
    if at < tl.where(asks, queries, keys):
        row = at // EACH
        if keep is not None:
            row = tl.load(keep + row * keep_stride, mask=asks, other=row).to(tl.int64)
        position = tl.load(base + row * base_stride) + at % EACH
        column = tl.arange(0, HALF_PLACES)
        frequency = tl.load(turn + HALF + column, mask=column < HALF, other=0.0)
        angle = position.to(tl.float32) * frequency
        cos, sin = tl.cos(angle), tl.sin(angle)
        if asks:
            _rotate_tile(
                query + at * query_row,
                query_head,
                query_dim,
                query_out + at * (QUERY_HEADS * 2 * HALF),
                tile * HEADS,
                cos,
                sin,
                query_norm,
                eps,
                QUERY_HEADS,
                HALF,
                HEADS,
                HALF_PLACES,
            )
        else:
            _rotate_tile(
                key + at * key_row,
                key_head,
                key_dim,
                key_out + at * (KEY_HEADS * 2 * HALF),
                (tile - QUERY_TILES) * HEADS,
                cos,
                sin,
                key_norm,
                eps,
                KEY_HEADS,
                HALF,
                HEADS,
                HALF_PLACES,
            )


@jit
def _rotate_tile(
    states,  # [ALL_HEADS, 2 HALF], of one position
    head_stride,
    dim_stride,
    out,  # contiguous
    first_head,
    cos,  # [HALF_PLACES] fp32
    sin,  # [HALF_PLACES] fp32
    norm,  # [2 HALF]; or None
    eps,
    ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PLACES: tl.constexpr,
):
    head, column = first_head + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF_PLACES)[None, :]
    within = column < HALF
    inside = (head < ALL_HEADS) & within
    dtype: tl.constexpr = out.dtype.element_ty
    states += head * head_stride + column * dim_stride
    left = tl.load(states, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(states + HALF * dim_stride, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        square = tl.sum(left * left + right * right, 1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        left = left * scale * tl.load(norm + column, mask=within, other=0.0).to(tl.float32)
        right = right * scale * tl.load(norm + HALF + column, mask=within, other=0.0).to(tl.float32)
        left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
    cos, sin = cos.to(dtype).to(tl.float32)[None, :], sin.to(dtype).to(tl.float32)[None, :]
    # Rounded between the two products, as torch does it: a drafter was trained with that.
    kept = (left * cos).to(dtype).to(tl.float32) - right * sin
    other = (right * cos).to(dtype).to(tl.float32) + left * sin
    out += head * (2 * HALF) + column
    tl.store(out, kept.to(dtype), mask=inside)
    tl.store(out + HALF, other.to(dtype), mask=inside)
