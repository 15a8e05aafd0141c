"""Tree attention kernel: one tile of queries over its KV range."""

from __future__ import annotations

from ..optional_triton import jit, tl
from .attention_inner import _read
from .attention_reduce import _count_splits, _finish, _in_other_form


@jit
def _or(a, b):
    return a | b


@jit
def _extremes(a, b, c, d, other_a, other_b, other_c, other_d):
    """Return the largest a, the smallest b, the largest c, the smallest d."""
    a, b = tl.maximum(a, other_a), tl.minimum(b, other_b)
    return a, b, tl.maximum(c, other_c), tl.minimum(d, other_d)


@jit(do_not_specialize=["num_tokens", "num_requests", "max_seq_len"])
def _tree_attention_kernel(
    query_ptr,  # [T, nh, D]
    kv_cache_ptr,  # [num_blocks, nkv, block_size, C], see `tree_attention`
    seen,  # VisibleEntries, mask_words [T, 2W] int32: words, low half first
    query_scale_ptr,  # [] fp32; or None
    key_scale_ptr,  # [] fp32; or None
    into,  # OutPointers
    partial_ptr,  # [R, nkv, slots, BLOCK_M, BLOCK_D] fp32, or None if WHOLE
    stats_ptr,  # [R, nkv, slots, 2, BLOCK_M] fp32, or None if WHOLE
    num_tokens,
    num_requests,
    max_seq_len,
    above,  # rows: requests of more, and at most `up_to`, are this launch's
    up_to,
    whole_from,  # see `_in_other_form`; None: any batch is this launch's
    scale,
    soft_cap,
    query_strides,  # RowStrides
    table_stride,
    mask_words32_stride,
    cache_strides,  # CacheStrides
    out_strides,  # RowStrides
    TILE: tl.constexpr,  # TileConstants
    READ: tl.constexpr,  # ReadConstants
):
    """One tile of BLOCK_M (token, query head of the group) rows of one request and one kv head."""
    slot = tl.program_id(0)
    request = tl.program_id(1)
    kv_head = tl.program_id(2)
    first_token = tl.load(seen.query_start + request)
    stop_token = tl.load(
        seen.query_start + request + 1, mask=request < num_requests, other=num_tokens
    )
    num_rows = (stop_token - first_token) * TILE.GROUP
    lane = tl.arange(0, TILE.BLOCK_M)
    nothing = tl.full([TILE.BLOCK_M], 0.0, tl.float32)
    if request == num_requests:
        for skip in range(0, num_rows, tl.num_programs(0) * TILE.BLOCK_M):
            at = skip + slot * TILE.BLOCK_M + lane
            _finish(
                (nothing, nothing, tl.full([TILE.BLOCK_M, TILE.BLOCK_D], 0.0, tl.float32)),
                (first_token + at // TILE.GROUP).to(tl.int64),
                kv_head * TILE.GROUP + at % TILE.GROUP,
                at < num_rows,
                into,
                out_strides,
                TILE,
            )
        return
    if (num_rows <= above) | (num_rows > up_to):
        return
    if whole_from is not None:  # noqa: SIM102 (known to the compiler, which the other is not)
        if _in_other_form(seen.query_start, whole_from, READ.WHOLE):
            return
    tiles = (num_rows + TILE.BLOCK_M - 1) // TILE.BLOCK_M
    bound = tl.minimum(tl.load(seen.seq_len + request), max_seq_len)
    splits = _count_splits(bound, tiles, TILE)
    tile, split = slot, 0
    if not READ.WHOLE:
        # Tiles of a split are neighbours, so they share reads in the L2 cache.
        tile, split = slot % tiles, slot // tiles
    if (tile >= tiles) | (split >= splits):
        return

    row = tile * TILE.BLOCK_M + lane
    row_in = row < num_rows
    token = (first_token + row // TILE.GROUP).to(tl.int64)
    head = kv_head * TILE.GROUP + row % TILE.GROUP
    dim = tl.arange(0, TILE.BLOCK_D)
    asked = (query_ptr + token * query_strides.token + head * query_strides.head)[:, None]
    q = tl.load(
        asked + dim[None, :] * query_strides.dim,
        mask=row_in[:, None] & (dim < TILE.HEAD)[None, :],
        other=0.0,
    )
    if READ.FP8:
        q = q.to(tl.float16)  # float16 holds every e4m3 value exactly
    query = (q,)
    if TILE.ROPE > 0:
        beyond = tl.arange(0, TILE.BLOCK_ROPE)[None, :]
        rope = tl.load(
            asked + (TILE.HEAD + beyond) * query_strides.dim,
            mask=row_in[:, None] & (beyond < TILE.ROPE),
            other=0.0,
        )
        query = (q, rope)  # type: ignore[assignment]
    prefix = tl.load(seen.prefix_len + token, mask=row_in, other=0)
    oldest = nothing.to(tl.int32)
    if seen.prefix_from is not None:
        oldest = tl.load(seen.prefix_from + token, mask=row_in, other=0)
    tree_begin = tl.load(seen.tree_start + request)
    row_mask_words32 = seen.mask_words + token * mask_words32_stride

    # No row of the tile sees an entry before `low` or from `end` on; every row sees those from
    # `open` to `shut`, which therefore need no mask.
    reach, shut, open, low = tl.reduce(
        (
            prefix,
            tl.where(row_in, prefix, max_seq_len),
            oldest,
            tl.where(row_in & (oldest < prefix), oldest, bound),
        ),
        0,
        _extremes,
    )
    span = low, reach
    union = ()
    MASK_WORDS32: tl.constexpr = READ.MASK_WORDS32  # see `optional_triton.py`
    for h in tl.static_range(MASK_WORDS32):
        half = tl.reduce(tl.load(row_mask_words32 + h, mask=row_in, other=0), 0, _or)
        reach = tl.where(half != 0, tl.maximum(reach, tree_begin + 32 * (h + 1)), reach)
        low = tl.where(half != 0, tl.minimum(low, tree_begin), low)
        # Triton does not support starred expressions.
        union = union + (half,)  # type: ignore[assignment]  # noqa: RUF005
    end = tl.minimum(reach, bound)
    low = tl.maximum(low, 0) // READ.BLOCK_N * READ.BLOCK_N
    open = (open + READ.BLOCK_N - 1) // READ.BLOCK_N * READ.BLOCK_N
    shut = tl.minimum(shut, end)
    shut = tl.maximum(shut // READ.BLOCK_N * READ.BLOCK_N, open)
    length = (tl.maximum(bound - low, 0) + splits - 1) // splits
    length = (length + READ.BLOCK_N - 1) // READ.BLOCK_N * READ.BLOCK_N

    # Scores in the scale of exp2: raw · factor.
    factor = scale * 1.4426950408889634
    inner = scale * 1.0
    if query_scale_ptr is not None:
        factor = factor * tl.load(query_scale_ptr)
        inner = inner * tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        factor = factor * tl.load(key_scale_ptr)
        inner = inner * tl.load(key_scale_ptr)
    if READ.CAPPED:
        factor = soft_cap * 1.4426950408889634
        inner = inner / soft_cap

    table = seen.block_table + request.to(tl.int64) * table_stride
    cache = kv_cache_ptr + kv_head.to(tl.int64) * cache_strides.head
    # [BLOCK_M] each: the prefix that a row sees; union: per half, what any row sees.
    rows = oldest, prefix
    tile_reads = cache, table, rows, union, span, tree_begin, end, factor, inner
    start = low + split * length
    state = _read(
        query,
        start,
        end if READ.WHOLE else tl.minimum(start + length, end),
        length,
        open,
        shut,
        tile_reads,
        seen.prefix_from,
        row_mask_words32,
        row_in,
        cache_strides,
        TILE,
        READ,
    )

    if not READ.WHOLE:  # noqa: SIM102 (known to the compiler, which the other is not)
        if splits > 1:
            place = (request * TILE.KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(0) + slot
            tl.store(
                partial_ptr
                + place * TILE.BLOCK_M * TILE.BLOCK_D
                + lane[:, None] * TILE.BLOCK_D
                + dim[None, :],
                state[2],
            )
            tl.store(stats_ptr + place * 2 * TILE.BLOCK_M + lane, state[0])
            tl.store(stats_ptr + place * 2 * TILE.BLOCK_M + TILE.BLOCK_M + lane, state[1])
            return
    _finish(state, token, head, row_in, into, out_strides, TILE)
