"""Attention over a paged KV cache under one visibility rule (SpecBlock paper, section 3.2).

Query t sees the entries 0 … prefix_len[t]-1 of its request, and of the 64·W entries from
window_start on those whose bit is set in words[t]. That covers, in one call and in any mixture:
prefill chunks and plain decode (a prefix, no bits), tree nodes (the committed prefix, then one
bit per ancestor), and the drafter's blocks (the rows before, then the own path's positions).

"Entry" means one key/value pair in the cache. A target has one per token slot; the drafter has K,
and its caller passes a cache view whose block_size is K times the engine's.
"""

from __future__ import annotations

import torch

from .optional_triton import cdiv, jit, next_power_of_2, tl
from .tree_attention_reference import attend_reference, plan_reference

LOG2_E = 1.4426950408889634


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    seq_len: torch.Tensor,
    max_seq_len: int,
    prefix_len: torch.Tensor,
    words: torch.Tensor,
    window_start: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packed attention of T query tokens, the R requests one after the other.

    query [T, nh, D]; kv_cache [num_blocks, nkv, block_size, 2D] of the same dtype, any strides,
    key in [..., :D] and value in [..., D:]; nh is a multiple of nkv
    block_table [R, max_blocks] int32; query_start [R+1] int32; max_query_len: no request has more
    query tokens; seq_len [R] int32: upper bound of the entries that request r may see, itself
    bounded by max_seq_len
    prefix_len [T] int32; words [T, W] int64 (bit j of word w is entry window_start + 64·w + j;
    bit 63 is the sign bit); window_start [R] int32; scale multiplies the scores
    -> out [T, nh, D]. A query that sees nothing gives zeros; so do tokens past query_start[R].

    CUDA tensors go to the Triton kernel: its grid depends on host integers only and nothing is
    read back, so the call can be captured in a CUDA graph. CPU tensors go to the torch reference,
    which a caller with many layers runs in its two parts, `plan_reference` once per step and
    `attend_reference` per layer.
    """
    if out is None:
        out = torch.empty_like(query)
    if query.is_cuda:
        return tree_attention_triton(
            query, kv_cache, block_table, query_start, max_query_len, seq_len, max_seq_len,
            prefix_len, words, window_start, scale, out,
        )  # fmt: skip
    plan = plan_reference(
        block_table, kv_cache.shape[2], query_start.numpy(), seq_len.clamp(max=max_seq_len).numpy(),
        prefix_len, words, window_start,
    )  # fmt: skip
    return attend_reference(query, kv_cache, plan, scale, out)


def tree_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    seq_len: torch.Tensor,
    max_seq_len: int,
    prefix_len: torch.Tensor,
    words: torch.Tensor,
    window_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel; arguments as in `tree_attention`."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    num_requests = len(query_start) - 1
    group = num_heads // num_kv_heads
    rows = max(max_query_len, 1) * group
    block_d = max(next_power_of_2(head_size), 16)
    # Shared memory: 32 KiB of queries, two stages of 16 KiB of keys and as much of values; that
    # is 96 KiB, which GPUs smaller than an A100 have, too. float32 is split in parts (tf32x3).
    row_bytes = block_d * (8 if query.dtype == torch.float32 else 2)
    block_m = min(max(next_power_of_2(rows), 16), 128, 32768 // row_bytes)
    block_n = min(64, max(16, 16384 // row_bytes))
    # The kernel works on 32-bit halves of the words: 64-bit masks cost twice the registers.
    halves = words.view(torch.int32)
    # One program row more than there are requests: it clears the tokens past query_start[R].
    _tree_attention_kernel[(cdiv(rows, block_m), num_requests + 1, num_kv_heads)](
        query, kv_cache, block_table, query_start, seq_len, prefix_len, halves, window_start, out,
        num_tokens, num_requests, max_seq_len, scale * LOG2_E,
        *query.stride(), *kv_cache.stride(), block_table.stride(0), halves.stride(0), *out.stride(),
        GROUP=group, HEAD=head_size, BLOCK_SIZE=block_size, HALVES=halves.shape[1],
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=8 if block_m == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


@jit
def _tree_attention_kernel(
    query,  # [T, nh, D]
    kv_cache,  # [num_blocks, nkv, block_size, 2D]
    block_table,  # [R, max_blocks] int32
    query_start,  # [R+1] int32
    seq_len,  # [R] int32
    prefix_len,  # [T] int32
    halves,  # [T, 2W] int32: words, low half first
    window_start,  # [R] int32
    out,  # [T, nh, D]
    num_tokens,
    num_requests,
    max_seq_len,
    scale_log2,
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
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,
    HALVES: tl.constexpr,  # 2W
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of BLOCK_M (token, query head of the group) rows of one request and one kv head."""
    tile = tl.program_id(0)
    request = tl.program_id(1)
    kv_head = tl.program_id(2)
    first_token = tl.load(query_start + request)
    stop_token = tl.load(query_start + request + 1, mask=request < num_requests, other=num_tokens)
    dim = tl.arange(0, BLOCK_D)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    num_rows = (stop_token - first_token) * GROUP
    if request == num_requests:
        for skip in range(0, num_rows, tl.num_programs(0) * BLOCK_M):
            at = skip + row
            token = (first_token + at // GROUP).to(tl.int64)
            head = kv_head * GROUP + at % GROUP
            tl.store(
                (out + token * out_token_stride + head * out_head_stride)[:, None]
                + dim[None, :] * out_dim_stride,
                tl.full([BLOCK_M, BLOCK_D], 0.0, out.dtype.element_ty),
                mask=(at < num_rows)[:, None] & (dim < HEAD)[None, :],
            )
        return
    if tile * BLOCK_M >= num_rows:
        return

    row_in = row < num_rows
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_mask = row_in[:, None] & (dim < HEAD)[None, :]
    q = tl.load(
        (query + token * query_token_stride + head * query_head_stride)[:, None]
        + dim[None, :] * query_dim_stride,
        mask=row_mask,
        other=0.0,
    )
    prefix = tl.load(prefix_len + token, mask=row_in, other=0)
    window = tl.load(window_start + request)
    row_halves = halves + token * halves_stride

    # Entries before `common` are seen by every row of the tile; none sees any from `end` on.
    reach = prefix
    for h in tl.static_range(HALVES):
        half = tl.load(row_halves + h, mask=row_in, other=0)
        reach = tl.where(half != 0, tl.maximum(reach, window + 32 * (h + 1)), reach)
    bound = tl.minimum(tl.load(seq_len + request), max_seq_len)
    end = tl.minimum(tl.max(reach, 0), bound)
    common = tl.minimum(tl.min(tl.where(row_in, prefix, end), 0), end)
    common = common // BLOCK_N * BLOCK_N

    table = block_table + request.to(tl.int64) * table_stride
    cache = kv_cache + kv_head.to(tl.int64) * cache_head_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for start in range(0, common, BLOCK_N):
        top, total, acc = _absorb(
            q, top, total, acc, start, cache, table, prefix, row_halves, row_in, window, end,
            scale_log2, cache_block_stride, cache_entry_stride, cache_dim_stride,
            HEAD, BLOCK_SIZE, HALVES, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    for start in tl.range(common, end, BLOCK_N, num_stages=1):
        top, total, acc = _absorb(
            q, top, total, acc, start, cache, table, prefix, row_halves, row_in, window, end,
            scale_log2, cache_block_stride, cache_entry_stride, cache_dim_stride,
            HEAD, BLOCK_SIZE, HALVES, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        (out + token * out_token_stride + head * out_head_stride)[:, None]
        + dim[None, :] * out_dim_stride,
        result.to(out.dtype.element_ty),
        mask=row_mask,
    )


@jit
def _absorb(
    q,  # [BLOCK_M, BLOCK_D]
    top,  # [BLOCK_M] fp32 largest score so far
    total,  # [BLOCK_M] fp32 sum of exponentials so far, relative to `top`
    acc,  # [BLOCK_M, BLOCK_D] fp32
    start,
    cache,
    table,
    prefix,  # [BLOCK_M] int32
    row_halves,  # [BLOCK_M] pointers to the rows' halves
    row_in,  # [BLOCK_M]
    window,
    end,
    scale_log2,
    cache_block_stride,
    cache_entry_stride,
    cache_dim_stride,
    HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of online softmax over the entries start … start+BLOCK_N-1."""
    entry = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    wanted = entry < end
    if MASKED:
        column = entry - window
        # BLOCK_N columns that begin anywhere touch so many 32-bit halves and no more. The shift
        # is arithmetic: columns before the window give negative halves, which hold no bits.
        first = (start - window) >> 5
        bits = tl.full([q.shape[0], BLOCK_N], 0, tl.int32)
        for i in tl.static_range((BLOCK_N + 30) // 32 + 1):
            number = tl.full([q.shape[0]], first + i, tl.int32)
            there = row_in & (number >= 0) & (number < HALVES)
            half = tl.load(row_halves + number, mask=there, other=0)
            bits = tl.where((column >> 5 == first + i)[None, :], half[:, None], bits)
        bits = (bits >> (column & 31)[None, :]) & 1
        visible = ((entry[None, :] < prefix[:, None]) | (bits != 0)) & wanted[None, :]
        # What nobody sees is not read: it may be unwritten memory, and 0 · NaN is NaN.
        wanted = tl.max(visible.to(tl.int32), 0) > 0

    block = tl.load(table + entry // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    at = cache + block * cache_block_stride + entry % BLOCK_SIZE * cache_entry_stride
    key = tl.load(
        at[None, :] + dim[:, None] * cache_dim_stride,
        mask=wanted[None, :] & (dim < HEAD)[:, None],
        other=0.0,
    )
    # "tf32x3" keeps about float32's accuracy; it changes nothing for 16-bit inputs.
    scores = tl.dot(q, key, input_precision="tf32x3") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # While a row has seen nothing its maximum is -inf, and -inf - -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weight, 1)
    value = tl.load(
        at[:, None] + (HEAD + dim)[None, :] * cache_dim_stride,
        mask=wanted[:, None] & (dim < HEAD)[None, :],
        other=0.0,
    )
    acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision="tf32x3")
    return new_top, total, acc
