"""The kernel of tree attention: one tile of queries over the entries that it sees."""

from __future__ import annotations

from ..optional_triton import jit, tl
from .attention_fold import _count_splits, _finish, _fold, _in_other_form
from .attention_step import _absorb


@jit
def _or(a, b):
    return a | b


@jit
def _extremes(a, b, c, d, other_a, other_b, other_c, other_d):
    """The largest a, the smallest b, the largest c, the smallest d."""
    a, b = tl.maximum(a, other_a), tl.minimum(b, other_b)
    return a, b, tl.maximum(c, other_c), tl.minimum(d, other_d)


@jit(do_not_specialize=["num_tokens", "num_requests", "max_seq_len"])
def _tree_attention_kernel(
    query,  # [T, nh, D]
    kv_cache,  # [num_blocks, nkv, block_size, 2D]
    block_table,  # [R, max_blocks] int32
    query_start,  # [R+1] int32
    seq_len,  # [R] int32
    prefix_len,  # [T] int32
    prefix_from,  # [T] int32 or None
    halves,  # [T, 2W] int32: words, low half first
    window_start,  # [R] int32
    key_scale,  # [] fp32 or None
    value_scale,  # [] fp32 or None
    out,  # [T, nh, D]
    lse,  # [T, nh] fp32 or None
    partial,  # [R, nkv, slots, BLOCK_M, BLOCK_D] fp32, or None if WHOLE
    stats,  # [R, nkv, slots, 2, BLOCK_M] fp32, or None if WHOLE
    num_tokens,
    num_requests,
    max_seq_len,
    above,  # rows: requests of more, and at most `up_to`, are this launch's
    up_to,
    whole_from,  # see `_in_other_form`; None: any batch is this launch's
    scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    query_dim_stride,
    cache_block_stride,
    cache_head_stride,
    cache_entry_stride,
    cache_dim_stride,
    table_stride,
    halves_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    lse_token_stride,
    lse_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,
    HALVES: tl.constexpr,  # 2W
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,  # BLOCK_N where a mask is needed, which takes registers
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_ENTRIES: tl.constexpr,
    CAPPED: tl.constexpr,
    WHOLE: tl.constexpr,  # this program reads all splits of its tile
    SINGLE: tl.constexpr,  # there is one split only
):
    """One tile of BLOCK_M (token, query head of the group) rows of one request and one kv head."""
    slot = tl.program_id(0)
    request = tl.program_id(1)
    kv_head = tl.program_id(2)
    first_token = tl.load(query_start + request)
    stop_token = tl.load(query_start + request + 1, mask=request < num_requests, other=num_tokens)
    num_rows = (stop_token - first_token) * GROUP
    lane = tl.arange(0, BLOCK_M)
    nothing = tl.full([BLOCK_M], 0.0, tl.float32)
    unseen = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if request == num_requests:
        for skip in range(0, num_rows, tl.num_programs(0) * BLOCK_M):
            at = skip + slot * BLOCK_M + lane
            _finish(
                unseen, nothing, tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32),
                (first_token + at // GROUP).to(tl.int64), kv_head * GROUP + at % GROUP,
                at < num_rows, value_scale, out, lse, out_token_stride, out_head_stride,
                out_dim_stride, lse_token_stride, lse_head_stride, HEAD, BLOCK_D,
            )  # fmt: skip
        return
    if (num_rows <= above) | (num_rows > up_to):
        return
    if whole_from is not None:  # noqa: SIM102 (known to the compiler, which the other is not)
        if _in_other_form(query_start, whole_from, WHOLE):
            return
    tiles = (num_rows + BLOCK_M - 1) // BLOCK_M
    bound = tl.minimum(tl.load(seq_len + request), max_seq_len)
    splits = _count_splits(bound, tiles, KV_HEADS, PROGRAMS, MAX_SPLITS, SPLIT_ENTRIES)
    tile, split = slot, 0
    if not WHOLE:
        # Tiles of a split lie side by side: what one reads, the next finds in the cache.
        tile, split = slot % tiles, slot // tiles
    if (tile >= tiles) | (split >= splits):
        return

    row = tile * BLOCK_M + lane
    row_in = row < num_rows
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    q = tl.load(
        (query + token * query_token_stride + head * query_head_stride)[:, None]
        + dim[None, :] * query_dim_stride,
        mask=row_in[:, None] & (dim < HEAD)[None, :],
        other=0.0,
    )
    prefix = tl.load(prefix_len + token, mask=row_in, other=0)
    oldest = nothing.to(tl.int32)
    if prefix_from is not None:
        oldest = tl.load(prefix_from + token, mask=row_in, other=0)
    window = tl.load(window_start + request)
    row_halves = halves + token * halves_stride

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
    for h in tl.static_range(HALVES):
        half = tl.reduce(tl.load(row_halves + h, mask=row_in, other=0), 0, _or)
        reach = tl.where(half != 0, tl.maximum(reach, window + 32 * (h + 1)), reach)
        low = tl.where(half != 0, tl.minimum(low, window), low)
        union = union + (half,)  # noqa: RUF005 (Triton knows no stars)
    end = tl.minimum(reach, bound)
    low = tl.maximum(low, 0) // BLOCK_N * BLOCK_N
    open = (open + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    shut = tl.minimum(shut, end)
    shut = tl.maximum(shut // BLOCK_N * BLOCK_N, open)
    length = (tl.maximum(bound - low, 0) + splits - 1) // splits
    length = (length + BLOCK_N - 1) // BLOCK_N * BLOCK_N

    # Scores in the scale of exp2: raw · factor.
    factor = scale * 1.4426950408889634
    inner = scale * 1.0
    if key_scale is not None:
        factor = factor * tl.load(key_scale)
        inner = inner * tl.load(key_scale)
    if CAPPED:
        factor = soft_cap * 1.4426950408889634
        inner = inner / soft_cap

    table = block_table + request.to(tl.int64) * table_stride
    cache = kv_cache + kv_head.to(tl.int64) * cache_head_stride
    start = low + split * length
    top, total, acc = _read(
        q, start, end if WHOLE else tl.minimum(start + length, end), length, open, shut, cache,
        table, prefix_from, oldest, prefix, row_halves, row_in, union, span, window, end, factor,
        inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD, BLOCK_SIZE, HALVES,
        BLOCK_M, BLOCK_N, MASKED_N, BLOCK_D, CAPPED, FOLDS=WHOLE and not SINGLE,
    )  # fmt: skip

    if not WHOLE:  # noqa: SIM102 (known to the compiler, which the other is not)
        if splits > 1:
            place = (request * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(0) + slot
            tl.store(
                partial + place * BLOCK_M * BLOCK_D + lane[:, None] * BLOCK_D + dim[None, :], acc
            )
            tl.store(stats + place * 2 * BLOCK_M + lane, top)
            tl.store(stats + place * 2 * BLOCK_M + BLOCK_M + lane, total)
            return
    _finish(
        top, total, acc, token, head, row_in, value_scale, out, lse, out_token_stride,
        out_head_stride, out_dim_stride, lse_token_stride, lse_head_stride, HEAD, BLOCK_D,
    )  # fmt: skip


@jit
def _read(
    q,  # [BLOCK_M, BLOCK_D]
    start,
    stop,
    length,
    open,
    shut,
    cache,
    table,
    prefix_from,
    oldest,  # [BLOCK_M] int32
    prefix,  # [BLOCK_M] int32
    row_halves,  # [BLOCK_M] pointers to the rows' halves
    row_in,  # [BLOCK_M]
    union,  # per half, what any row sees
    span,  # the entries of any row's prefix
    window,
    end,
    factor,
    inner,
    cache_block_stride,
    cache_entry_stride,
    cache_dim_stride,
    HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    FOLDS: tl.constexpr,
):
    """The entries start … stop-1: with a mask before `open`, without one up to `shut`, with one
    from there on.

    FOLDS: these are several splits of `length` entries, the last one maybe less. Each is summed up
    by itself and folded in its turn. One loop over all of them keeps the next entries on their
    way across a border; a loop for each would wait for memory anew.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    folded = (top, total, acc)
    if prefix_from is not None:
        halves = _load_halves(row_halves, row_in, HALVES)
        for at in tl.range(start, tl.minimum(stop, open), MASKED_N, num_stages=2):
            top, total, acc, folded = _cross(at, start, length, top, total, acc, folded, FOLDS)
            top, total, acc = _absorb(
                q, top, total, acc, at, cache, table, oldest, prefix, halves, union, span, window,
                end, factor, inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD,
                BLOCK_SIZE, HALVES, MASKED_N, BLOCK_D, CAPPED, MASKED=True,
            )  # fmt: skip
    for at in range(tl.maximum(start, open), tl.minimum(stop, shut), BLOCK_N):
        top, total, acc, folded = _cross(at, start, length, top, total, acc, folded, FOLDS)
        top, total, acc = _absorb(
            q, top, total, acc, at, cache, table, oldest, prefix, None, None, None, window, end,
            factor, inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD,
            BLOCK_SIZE, HALVES, BLOCK_N, BLOCK_D, CAPPED, MASKED=False,
        )  # fmt: skip
    # Anew: held through the loop before, they would take registers that it needs.
    halves = _load_halves(row_halves, row_in, HALVES)
    for at in tl.range(tl.maximum(start, shut), stop, MASKED_N, num_stages=2):
        top, total, acc, folded = _cross(at, start, length, top, total, acc, folded, FOLDS)
        top, total, acc = _absorb(
            q, top, total, acc, at, cache, table, oldest, prefix, halves, union, span, window, end,
            factor, inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD,
            BLOCK_SIZE, HALVES, MASKED_N, BLOCK_D, CAPPED, MASKED=True,
        )  # fmt: skip
    if FOLDS:
        top, total, acc = _fold(folded[0], folded[1], folded[2], top, total, acc)
    return top, total, acc


@jit
def _cross(at, start, length, top, total, acc, folded, FOLDS: tl.constexpr):
    """Where the entries from `at` on are another split's, fold what there is and begin anew."""
    if FOLDS:  # noqa: SIM102 (known to the compiler, which the other is not)
        if (at > start) & ((at - start) % length == 0):
            folded = _fold(folded[0], folded[1], folded[2], top, total, acc)
            top = tl.full(top.shape, float("-inf"), tl.float32)
            total = tl.full(total.shape, 0.0, tl.float32)
            acc = tl.full(acc.shape, 0.0, tl.float32)
    return top, total, acc, folded


@jit
def _load_halves(row_halves, row_in, HALVES: tl.constexpr):
    halves = ()
    for h in tl.static_range(HALVES):
        half = tl.load(row_halves + h, mask=row_in, other=0)
        halves = halves + (half,)  # noqa: RUF005 (as above)
    return halves
