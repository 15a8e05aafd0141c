"""RoPE of queries and keys, half-split over the whole head, in one launch.

The results are new tensors: in place, threads that hold the same numbers twice, as those of a
small tile do, could read what others have rotated already.
"""

from __future__ import annotations

import torch

from .optional_triton import cdiv, jit, next_power_of_2, tl


def rotate_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, each at its position.

    CUDA tensors go to the kernel, unless a gradient is needed; everything else to the reference.

    Args:
        query: [Q, ..., heads, D].
        key: [T, ..., kv heads, D], all of one dtype.
        cos, sin: [T, ..., 1, D], sin with the minus of the rotation in its first half.
        keep: [Q] int64, whose queries they are of T rows; None: everybody's, and Q = T.
    """
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    fused = query.is_cuda and not needs_grad
    return (rotate_pair_triton if fused else rotate_pair_reference)(query, key, cos, sin, keep)


def rotate_pair_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `rotate_pair` has them; differentiable."""
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
    cos: torch.Tensor,
    sin: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as `rotate_pair` has them."""
    query, key, cos, sin = (x.contiguous() for x in (query, key, cos, sin))
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    (query_heads, size), key_heads = query.shape[-2:], key.shape[-2]
    queries, keys = query.shape[:-2].numel(), key.shape[:-2].numel()
    half_places = next_power_of_2(size // 2)
    heads = min(next_power_of_2(max(query_heads, key_heads)), max(1, 1024 // half_places))
    query_tiles = cdiv(query_heads, heads)
    if queries or keys:
        _rotate_pair_kernel[(max(queries, keys), query_tiles + cdiv(key_heads, heads))](
            query, query_out, queries, key, key_out, keys, cos, sin, keep,
            0 if keep is None else keep.stride(0), EACH=cos.shape[1:-2].numel(),
            QUERY_HEADS=query_heads, KEY_HEADS=key_heads, HALF=size // 2, QUERY_TILES=query_tiles,
            HEADS=heads, HALF_PLACES=half_places, num_warps=4,
        )  # fmt: skip
    return query_out, key_out


@jit(do_not_specialize=["queries", "keys", "keep_stride"])
def _rotate_pair_kernel(
    query, query_out, queries,  # [queries, QUERY_HEADS, 2 HALF] contiguous, twice
    key, key_out, keys,  # [keys, KEY_HEADS, 2 HALF] contiguous, twice
    cos, sin,  # [keys, 2 HALF] contiguous
    keep, keep_stride,  # [queries / EACH] int64; or None
    EACH: tl.constexpr,  # positions of a row
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    HEADS: tl.constexpr,  # of a tile
    HALF_PLACES: tl.constexpr,
):  # fmt: skip
    """Some heads of one position: first the tiles of its query, then those of its key."""
    at, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile < QUERY_TILES:
        if at < queries:
            angle = at
            if keep is not None:
                angle = tl.load(keep + at // EACH * keep_stride).to(tl.int64) * EACH + at % EACH
            _rotate_tile(
                query, query_out, at, tile * HEADS, cos, sin, angle,
                QUERY_HEADS, HALF, HEADS, HALF_PLACES,
            )  # fmt: skip
    elif at < keys:
        _rotate_tile(
            key, key_out, at, (tile - QUERY_TILES) * HEADS, cos, sin, at,
            KEY_HEADS, HALF, HEADS, HALF_PLACES,
        )  # fmt: skip


@jit
def _rotate_tile(
    states, out, at, first_head, cos, sin, angle,
    ALL_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HALF_PLACES: tl.constexpr,
):  # fmt: skip
    head, column = first_head + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF_PLACES)[None, :]
    within = column < HALF
    inside = (head < ALL_HEADS) & within
    cell = (at * ALL_HEADS + head) * (2 * HALF) + column
    left = tl.load(states + cell, mask=inside).to(tl.float32)
    right = tl.load(states + cell + HALF, mask=inside).to(tl.float32)
    cos += angle * (2 * HALF) + column
    sin += angle * (2 * HALF) + column
    kept = left * tl.load(cos, mask=within).to(tl.float32)
    other = right * tl.load(cos + HALF, mask=within).to(tl.float32)
    # Rounded between the two products, as torch does it: a drafter was trained with that.
    dtype: tl.constexpr = out.dtype.element_ty
    kept = kept.to(dtype).to(tl.float32) + right * tl.load(sin, mask=within).to(tl.float32)
    other = other.to(dtype).to(tl.float32) + left * tl.load(sin + HALF, mask=within).to(tl.float32)
    tl.store(out + cell, kept.to(dtype), mask=inside)
    tl.store(out + cell + HALF, other.to(dtype), mask=inside)
