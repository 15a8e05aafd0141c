"""Tree attention kernel: one tile of queries over its KV range."""

from __future__ import annotations

from ..optional_triton import jit, tl
from .attention_inner import _softmax_step
from .attention_reduce import _count_splits, _finish, _in_other_form, _merge_splits


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
    mask_words32,  # [T, 2W] int32: words, low half first
    tree_start,  # [R] int32
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
    mask_words32_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    lse_token_stride,
    lse_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,
    MASK_WORDS32: tl.constexpr,  # 2W
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
    tree_begin = tl.load(tree_start + request)
    row_mask_words32 = mask_words32 + token * mask_words32_stride

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
    for h in tl.static_range(MASK_WORDS32):
        half = tl.reduce(tl.load(row_mask_words32 + h, mask=row_in, other=0), 0, _or)
        reach = tl.where(half != 0, tl.maximum(reach, tree_begin + 32 * (h + 1)), reach)
        low = tl.where(half != 0, tl.minimum(low, tree_begin), low)
        # Triton knows no stars.
        union = union + (half,)  # type: ignore[assignment]  # noqa: RUF005
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
    m_i, l_i, acc = _read(
        q, start, end if WHOLE else tl.minimum(start + length, end), length, open, shut, cache,
        table, prefix_from, oldest, prefix, row_mask_words32, row_in, union, span, tree_begin, end,
        factor, inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD, BLOCK_SIZE,
        MASK_WORDS32, BLOCK_M, BLOCK_N, MASKED_N, BLOCK_D, CAPPED, MERGES=WHOLE and not SINGLE,
    )  # fmt: skip

    if not WHOLE:  # noqa: SIM102 (known to the compiler, which the other is not)
        if splits > 1:
            place = (request * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(0) + slot
            tl.store(
                partial + place * BLOCK_M * BLOCK_D + lane[:, None] * BLOCK_D + dim[None, :], acc
            )
            tl.store(stats + place * 2 * BLOCK_M + lane, m_i)
            tl.store(stats + place * 2 * BLOCK_M + BLOCK_M + lane, l_i)
            return
    _finish(
        m_i, l_i, acc, token, head, row_in, value_scale, out, lse, out_token_stride,
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
    row_mask_words32,  # [BLOCK_M] pointers to the rows' halves
    row_in,  # [BLOCK_M]
    union,  # per half, what any row sees
    span,  # the entries of any row's prefix
    tree_begin,
    end,
    factor,
    inner,
    cache_block_stride,
    cache_entry_stride,
    cache_dim_stride,
    HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASK_WORDS32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    MERGES: tl.constexpr,
):
    """The entries start … stop-1: with a mask before `open`, without one up to `shut`, with one
    from there on.

    MERGES: these are several splits of `length` entries, the last one maybe less. Each is summed up
    by itself and folded in its turn. One loop over all of them keeps the next entries on their
    way across a border; a loop for each would wait for memory anew.
    """
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    merged = (m_i, l_i, acc)
    if prefix_from is not None:
        mask_words32 = _load_mask_words32(row_mask_words32, row_in, MASK_WORDS32)
        for at in tl.range(start, tl.minimum(stop, open), MASKED_N, num_stages=2):
            m_i, l_i, acc, merged = _cross(at, start, length, m_i, l_i, acc, merged, MERGES)
            m_i, l_i, acc = _softmax_step(
                q, m_i, l_i, acc, at, cache, table, oldest, prefix, mask_words32, union, span,
                tree_begin, end, factor, inner, cache_block_stride, cache_entry_stride,
                cache_dim_stride, HEAD, BLOCK_SIZE, MASK_WORDS32, MASKED_N, BLOCK_D, CAPPED,
                MASKED=True,
            )  # fmt: skip
    for at in range(tl.maximum(start, open), tl.minimum(stop, shut), BLOCK_N):
        m_i, l_i, acc, merged = _cross(at, start, length, m_i, l_i, acc, merged, MERGES)
        m_i, l_i, acc = _softmax_step(
            q, m_i, l_i, acc, at, cache, table, oldest, prefix, None, None, None, tree_begin, end,
            factor, inner, cache_block_stride, cache_entry_stride, cache_dim_stride, HEAD,
            BLOCK_SIZE, MASK_WORDS32, BLOCK_N, BLOCK_D, CAPPED, MASKED=False,
        )  # fmt: skip
    # Anew: held through the loop before, they would take registers that it needs.
    mask_words32 = _load_mask_words32(row_mask_words32, row_in, MASK_WORDS32)
    for at in tl.range(tl.maximum(start, shut), stop, MASKED_N, num_stages=2):
        m_i, l_i, acc, merged = _cross(at, start, length, m_i, l_i, acc, merged, MERGES)
        m_i, l_i, acc = _softmax_step(
            q, m_i, l_i, acc, at, cache, table, oldest, prefix, mask_words32, union, span,
            tree_begin, end, factor, inner, cache_block_stride, cache_entry_stride,
            cache_dim_stride, HEAD, BLOCK_SIZE, MASK_WORDS32, MASKED_N, BLOCK_D, CAPPED,
            MASKED=True,
        )  # fmt: skip
    if MERGES:
        m_i, l_i, acc = _merge_splits(merged[0], merged[1], merged[2], m_i, l_i, acc)
    return m_i, l_i, acc


@jit
def _cross(at, start, length, m_i, l_i, acc, merged, MERGES: tl.constexpr):
    """Where the entries from `at` on are another split's, fold what there is and begin anew."""
    if MERGES:  # noqa: SIM102 (known to the compiler, which the other is not)
        if (at > start) & ((at - start) % length == 0):
            merged = _merge_splits(merged[0], merged[1], merged[2], m_i, l_i, acc)
            m_i = tl.full(m_i.shape, float("-inf"), tl.float32)
            l_i = tl.full(l_i.shape, 0.0, tl.float32)
            acc = tl.full(acc.shape, 0.0, tl.float32)
    return m_i, l_i, acc, merged


@jit
def _load_mask_words32(row_mask_words32, row_in, MASK_WORDS32: tl.constexpr):
    mask_words32 = ()
    for h in tl.static_range(MASK_WORDS32):
        half = tl.load(row_mask_words32 + h, mask=row_in, other=0)
        mask_words32 = mask_words32 + (half,)  # type: ignore[assignment]  # noqa: RUF005
    return mask_words32
