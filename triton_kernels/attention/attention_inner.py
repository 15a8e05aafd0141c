"""Inner loops of tree attention: online softmax over KV blocks, masked or not."""

from __future__ import annotations

from typing import NamedTuple

from ..optional_triton import jit, tl
from .attention_reduce import _merge_splits, empty_state


class ReadConstants(NamedTuple):
    """Compile-time constants beside `TileConstants`."""

    BLOCK_SIZE: int
    MASK_WORDS32: int  # 2W
    BLOCK_N: int
    MASKED_N: int  # BLOCK_N where a mask is needed, which takes registers
    CAPPED: bool
    WHOLE: bool  # this program reads all splits of its tile
    SINGLE: bool  # there is one split only
    FP8: bool  # float8 queries: round weights to e4m3, as FlashAttention 3 does


@jit
def _columns(mask_words32, first, shift, MASK_WORDS32: tl.constexpr):
    """Return the 32 bits from bit `shift` of half `first` on; missing halves are 0."""
    low = mask_words32[0] & 0
    high = low
    for h in tl.static_range(MASK_WORDS32):
        low = tl.where(first == h, mask_words32[h], low)
        high = tl.where(first + 1 == h, mask_words32[h], high)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    # In two steps: a shift by 32 is no shift.
    word = (low >> shift) | ((high << 1) << (31 - shift))
    return word.to(tl.int32, bitcast=True)


@jit
def _load_entries(
    at,  # [BLOCK_N] pointers to the entries
    first,  # dimension
    wanted,  # [BLOCK_N], entries to read; None: all
    strides,  # CacheStrides
    DIMS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,  # >= DIMS
):
    """Return keys or values [BLOCK_N, BLOCK_DIMS]; 0 for entries that are not read."""
    dim = tl.arange(0, BLOCK_DIMS)
    place = at[:, None] + (first + dim)[None, :] * strides.dim
    if wanted is not None:
        inside = wanted[:, None] & (dim < DIMS)[None, :]
        entries = tl.load(place, mask=inside, other=0.0)
    elif DIMS == BLOCK_DIMS:
        entries = tl.load(place)
    else:
        entries = tl.load(place, mask=(dim < DIMS)[None, :], other=0.0)
    return entries


@jit
def _softmax_step(
    query,  # [BLOCK_M, BLOCK_D], and [BLOCK_M, BLOCK_ROPE] if ROPE > 0
    state,  # of the entries so far, see `attention_reduce.py`
    start,
    tile,  # what a tile of rows reads, see `_tree_attention_kernel`
    mask_words32,  # per half [BLOCK_M] int32, what each row sees; None: no mask is needed
    strides,  # CacheStrides
    TILE: tl.constexpr,  # TileConstants
    READ: tl.constexpr,  # ReadConstants
    BLOCK_N: tl.constexpr,
):
    """One step of online softmax over the entries start … start+BLOCK_N-1."""
    q = query[0]
    m_i, l_i, acc = state
    cache, table, rows, union, span, tree_begin, end, factor, inner = tile
    MASKED: tl.constexpr = mask_words32 is not None
    entry = start + tl.arange(0, BLOCK_N)
    if MASKED:
        wanted = entry < end
        # The shift is arithmetic: columns before the window give negative halves, which hold no
        # bits.
        first, shift = (start - tree_begin) >> 5, (start - tree_begin) & 31
        bits = tl.full([1, BLOCK_N], 0, tl.int32)
        seen = tl.full([BLOCK_N], 0, tl.int32)
        for i in tl.static_range((BLOCK_N + 31) // 32):
            here = tl.arange(0, BLOCK_N) >> 5 == i
            word = _columns(mask_words32, first + i, shift, READ.MASK_WORDS32)
            bits = tl.where(here[None, :], word[:, None], bits)
            seen = tl.where(here, _columns(union, first + i, shift, READ.MASK_WORDS32), seen)
        place = tl.arange(0, BLOCK_N) & 31
        bits = (bits >> place[None, :]) & 1
        in_prefix = (entry[None, :] < rows[1][:, None]) & (entry[None, :] >= rows[0][:, None])
        visible = (in_prefix | (bits != 0)) & wanted[None, :]
        # Entries that no row sees are not read: they may be unwritten, and 0 · NaN is NaN.
        in_span = (entry >= span[0]) & (entry < span[1])
        wanted = wanted & (in_span | ((seen >> place) & 1 != 0))
        block = tl.load(table + entry // READ.BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
        at = cache + block * strides.block + entry % READ.BLOCK_SIZE * strides.entry
    else:
        wanted = None
        block = tl.load(table + entry // READ.BLOCK_SIZE).to(tl.int64)
        at = cache + block * strides.block + entry % READ.BLOCK_SIZE * strides.entry
    key = _load_entries(at, 0, wanted, strides, TILE.HEAD, TILE.BLOCK_D).to(q.dtype)
    # "tf32x3" keeps about float32's accuracy; it changes nothing for 16-bit inputs.
    # Same layout as the values, so that addresses are computed once.
    raw = tl.dot(q, key.T, input_precision="tf32x3")
    if TILE.ROPE > 0:
        rest = _load_entries(at, TILE.HEAD, wanted, strides, TILE.ROPE, TILE.BLOCK_ROPE)
        raw = tl.dot(query[1], rest.to(q.dtype).T, raw, input_precision="tf32x3")
    if READ.CAPPED:
        # tanh; for large inputs the exponential is infinite or 0, and the fraction 0 or 2.
        raw = 1.0 - 2.0 / (1.0 + tl.exp2(raw * (inner * 2.8853900817779268)))
    if MASKED:
        raw = tl.where(visible, raw, float("-inf"))
    top = tl.max(raw, 1) * factor
    if READ.FP8:
        top -= 8.0  # scale weights up to 256: e4m3 then keeps more of the small ones
    m_new = tl.maximum(m_i, top)
    # While a row has seen nothing its maximum is -inf, and -inf - -inf is NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2(raw * factor - base[:, None])
    decay = tl.exp2(m_i - base)
    l_i = l_i * decay + tl.sum(weight, 1)
    if READ.FP8:
        weight = weight.to(tl.float8e4nv)
    if TILE.ROPE > 0:
        value = key
    else:
        value = _load_entries(at, TILE.HEAD, wanted, strides, TILE.HEAD, TILE.BLOCK_D).to(q.dtype)
    acc = tl.dot(weight.to(q.dtype), value, acc * decay[:, None], input_precision="tf32x3")
    return (m_new, l_i, acc)


@jit
def _read(
    query,  # as `_softmax_step` has it
    start,
    stop,
    length,
    open,
    shut,
    tile,  # as `_softmax_step` has it
    prefix_from,
    row_mask_words32,  # [BLOCK_M] pointers to the rows' halves
    row_in,  # [BLOCK_M]
    strides,  # CacheStrides
    TILE: tl.constexpr,  # TileConstants
    READ: tl.constexpr,  # ReadConstants
):
    """Read the entries start … stop-1, without a mask from `open` to `shut`.

    WHOLE: these are several splits of `length` entries, each folded in its turn. One loop over all
    of them keeps loads in flight across a border.
    """
    state = empty_state(TILE.BLOCK_M, TILE.BLOCK_D)
    merged = state
    MERGES: tl.constexpr = READ.WHOLE and not READ.SINGLE
    if prefix_from is not None:
        words = _load_mask_words32(row_mask_words32, row_in, READ.MASK_WORDS32)
        for at in tl.range(start, tl.minimum(stop, open), READ.MASKED_N, num_stages=2):
            state, merged = _cross(at, start, length, state, merged, TILE, MERGES)
            state = _softmax_step(query, state, at, tile, words, strides, TILE, READ, READ.MASKED_N)
    for at in range(tl.maximum(start, open), tl.minimum(stop, shut), READ.BLOCK_N):
        state, merged = _cross(at, start, length, state, merged, TILE, MERGES)
        state = _softmax_step(query, state, at, tile, None, strides, TILE, READ, READ.BLOCK_N)
    # Recomputed: kept through the loop above, they would take its registers.
    words = _load_mask_words32(row_mask_words32, row_in, READ.MASK_WORDS32)
    for at in tl.range(tl.maximum(start, shut), stop, READ.MASKED_N, num_stages=2):
        state, merged = _cross(at, start, length, state, merged, TILE, MERGES)
        state = _softmax_step(query, state, at, tile, words, strides, TILE, READ, READ.MASKED_N)
    if MERGES:
        state = _merge_splits(merged, state)
    return state


@jit
def _cross(at, start, length, state, merged, TILE: tl.constexpr, MERGES: tl.constexpr):
    """Where the entries from `at` on are another split's, fold what there is and begin anew."""
    if MERGES:  # noqa: SIM102 (known to the compiler, which the other is not)
        if (at > start) & ((at - start) % length == 0):
            merged = _merge_splits(merged, state)
            state = empty_state(TILE.BLOCK_M, TILE.BLOCK_D)
    return state, merged


@jit
def _load_mask_words32(row_mask_words32, row_in, MASK_WORDS32: tl.constexpr):
    mask_words32 = ()
    for h in tl.static_range(MASK_WORDS32):
        half = tl.load(row_mask_words32 + h, mask=row_in, other=0)
        mask_words32 = mask_words32 + (half,)  # type: ignore[assignment]  # noqa: RUF005
    return mask_words32
