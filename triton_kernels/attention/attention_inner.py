"""Inner loop of tree attention: online softmax over one KV block, masked or not."""

from __future__ import annotations

from ..optional_triton import jit, tl


@jit
def _columns(mask_words32, first, shift, MASK_WORDS32: tl.constexpr):
    """The 32 bits that begin `shift` bits into half `first`; halves that are not there are 0."""
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
def _softmax_step(
    q,  # [BLOCK_M, BLOCK_D]
    m_i,  # [BLOCK_M] fp32 largest score so far
    l_i,  # [BLOCK_M] fp32 sum of exponentials so far, relative to `m_i`
    acc,  # [BLOCK_M, BLOCK_D] fp32
    start,
    cache,
    table,
    oldest,  # [BLOCK_M] int32
    prefix,  # [BLOCK_M] int32
    mask_words32,  # per half [BLOCK_M] int32, what each row sees; like the next two only if MASKED
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
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of online softmax over the entries start … start+BLOCK_N-1."""
    entry = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_in = dim < HEAD
    if MASKED:
        wanted = entry < end
        # The shift is arithmetic: columns before the window give negative halves, which hold no
        # bits.
        first, shift = (start - tree_begin) >> 5, (start - tree_begin) & 31
        bits = tl.full([1, BLOCK_N], 0, tl.int32)
        seen = tl.full([BLOCK_N], 0, tl.int32)
        for i in tl.static_range((BLOCK_N + 31) // 32):
            here = tl.arange(0, BLOCK_N) >> 5 == i
            word = _columns(mask_words32, first + i, shift, MASK_WORDS32)
            bits = tl.where(here[None, :], word[:, None], bits)
            seen = tl.where(here, _columns(union, first + i, shift, MASK_WORDS32), seen)
        place = tl.arange(0, BLOCK_N) & 31
        bits = (bits >> place[None, :]) & 1
        in_prefix = (entry[None, :] < prefix[:, None]) & (entry[None, :] >= oldest[:, None])
        visible = (in_prefix | (bits != 0)) & wanted[None, :]
        # What nobody sees is not read: it may be unwritten memory, and 0 · NaN is NaN.
        in_span = (entry >= span[0]) & (entry < span[1])
        wanted = wanted & (in_span | ((seen >> place) & 1 != 0))
        block = tl.load(table + entry // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
        at = cache + block * cache_block_stride + entry % BLOCK_SIZE * cache_entry_stride
        key = tl.load(
            at[:, None] + dim[None, :] * cache_dim_stride,
            mask=wanted[:, None] & dim_in[None, :],
            other=0.0,
        )
    else:
        block = tl.load(table + entry // BLOCK_SIZE).to(tl.int64)
        at = cache + block * cache_block_stride + entry % BLOCK_SIZE * cache_entry_stride
        if HEAD == BLOCK_D:
            key = tl.load(at[:, None] + dim[None, :] * cache_dim_stride)
        else:
            key = tl.load(
                at[:, None] + dim[None, :] * cache_dim_stride, mask=dim_in[None, :], other=0.0
            )
    # "tf32x3" keeps about float32's accuracy; it changes nothing for 16-bit inputs.
    # Read as the values are, so that both have the same addresses, worked out once.
    raw = tl.dot(q, key.to(q.dtype).T, input_precision="tf32x3")
    if CAPPED:
        # tanh; far out the exponential is infinite or 0, and the fraction 0 or 2.
        raw = 1.0 - 2.0 / (1.0 + tl.exp2(raw * (inner * 2.8853900817779268)))
    if MASKED:
        raw = tl.where(visible, raw, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(raw, 1) * factor)
    # While a row has seen nothing its maximum is -inf, and -inf - -inf is NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2(raw * factor - base[:, None])
    decay = tl.exp2(m_i - base)
    l_i = l_i * decay + tl.sum(weight, 1)
    if MASKED:
        value = tl.load(
            at[:, None] + (HEAD + dim)[None, :] * cache_dim_stride,
            mask=wanted[:, None] & dim_in[None, :],
            other=0.0,
        )
    else:
        if HEAD == BLOCK_D:
            value = tl.load(at[:, None] + (HEAD + dim)[None, :] * cache_dim_stride)
        else:
            value = tl.load(
                at[:, None] + (HEAD + dim)[None, :] * cache_dim_stride,
                mask=dim_in[None, :],
                other=0.0,
            )
    value = value.to(q.dtype)
    acc = tl.dot(weight.to(q.dtype), value, acc * decay[:, None], input_precision="tf32x3")
    return m_new, l_i, acc
