"""One layer's attention on a CPU, over a packed cache: the loop.

`cpu_attention.py` says which rows and what they see; `cpu_vectors.py` holds the instructions.
Importing this module needs numba.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numba import njit, types

from .cpu_memory import view_of
from .cpu_vectors import (
    BF16,
    COLUMNS,
    FP32,
    ROWS,
    TILE_ROWS,
    amx_begin,
    amx_end,
    amx_multiply,
    multiply,
    row_exp2,
    row_max,
    scale_row,
)

CHUNK = 64  # query rows × heads of one KV head that share what is read of the cache, if they fit
TILE = 1024  # entries whose scores are held at once
PITCH = TILE + 16  # from row to row: at 4096 bytes all rows of a tile would share one set of L1
LOG2E = np.float32(1.4426950408889634)
# The columns of `jobs`: first row, rows, request, entries from … to, the mask's first entry and its
# place.
FIRST, COUNT, REQUEST, FROM, MASK_FROM, TO, MASK = range(7)


@lru_cache
def attention_loop(element: int, amx: bool):
    """→ f(query, …, out, …, cache, …): what `cpu_attention.attend` calls for every layer.

    element: of query, cache and output. amx: the cache is packed for AMX tiles (bf16 only),
    otherwise keys by dimension and values by entry.
    """
    size = 4 if element == FP32 else 2
    tile_rows = TILE_ROWS if amx else ROWS
    held = BF16 if amx else FP32  # queries and weights as the multiplications want them
    held_size = 2 if amx else 4
    take, give = scale_row(element, held), scale_row(FP32, element)
    integers = view_of(types.int32)
    weigh, products = row_exp2(held), multiply(element)

    @njit(nogil=True, error_model="numpy")
    def scores(q, keys, c, rows, tokens, head_dim, block_size):
        """c [rows, PITCH] = q [rows, D] · the keys of `tokens` entries of one block."""
        for token in range(0, tokens, COLUMNS):
            for row in range(0, rows, tile_rows):
                at = c + (row * PITCH + token) * 4
                if amx:
                    amx_multiply(
                        q + row * head_dim * 2, head_dim * 2, keys + token * head_dim * 2,
                        16 * head_dim * 2, at, PITCH * 4, head_dim // 32, 0,
                    )  # fmt: skip
                else:
                    products(
                        q + row * head_dim * 4, head_dim, keys + token * size, block_size, at,
                        PITCH, head_dim, 0,
                    )  # fmt: skip

    @njit(nogil=True, error_model="numpy")
    def values(p, values, o, rows, tokens, head_dim, block_size, add):
        """o [rows, D] (+)= p [rows, PITCH] · the values of `tokens` entries of one block."""
        for dim in range(0, head_dim, COLUMNS):
            for row in range(0, rows, tile_rows):
                weights, at = p + row * PITCH * 4, o + (row * head_dim + dim) * 4
                if amx:
                    amx_multiply(
                        weights, PITCH * 4, values + dim * block_size * 2, 16 * block_size * 2, at,
                        head_dim * 4, tokens // 32, add,
                    )  # fmt: skip
                else:
                    products(
                        weights, PITCH, values + dim * size, head_dim, at, head_dim, tokens, add
                    )

    @njit(nogil=True, error_model="numpy")
    def attend(
        query, query_row, query_head,  # address, strides in elements
        out, out_row, out_head,
        cache, block_stride, kv_head_stride,  # in elements
        table, table_row,  # [R, blocks] int32
        mask, jobs,  # [·] fp32, [J, 7] int64
        kv_heads, group, head_dim, block_size, scale, soft_cap,
        q_buffer, o_buffer, s_buffer, stats, config,
    ):  # fmt: skip
        q, o, s = q_buffer.ctypes.data, o_buffer.ctypes.data, s_buffer.ctypes.data
        masks = mask.ctypes.data
        factor = np.float32(scale) * LOG2E
        cap = np.float32(soft_cap / scale)  # of the products before `scale`
        if amx:
            amx_begin(config.ctypes.data)
        for job in range(jobs.shape[0]):
            first, count, request = jobs[job, FIRST], jobs[job, COUNT], jobs[job, REQUEST]
            start, end, mask_from = jobs[job, FROM], jobs[job, TO], jobs[job, MASK_FROM]
            rows, blocks = count * group, integers(table + request * table_row * 4, end)
            for kv_head in range(kv_heads):
                head_at = kv_head * kv_head_stride
                for line in range(count):
                    for member in range(group):
                        at = (first + line) * query_row + (kv_head * group + member) * query_head
                        row = line * group + member
                        take(
                            query + at * size, q + row * head_dim * held_size, head_dim,
                            np.float32(1.0),
                        )  # fmt: skip
                        stats[row, 0], stats[row, 1] = -np.inf, 0.0
                if start == end:
                    o_buffer[:rows] = 0.0
                for tile in range(start, end, TILE):
                    ahead = min(tile + TILE, end)
                    at = tile
                    while at < ahead:
                        within = at % block_size
                        tokens = min(block_size - within, ahead - at)
                        place = blocks[at // block_size] * block_stride + head_at
                        # `within` is a multiple of 32.
                        place += within * head_dim if amx else within
                        scores(
                            q, cache + place * size, s + (at - tile) * 4, rows, tokens, head_dim,
                            block_size,
                        )  # fmt: skip
                        at += tokens
                    if cap > 0:
                        for row in range(rows):
                            for entry in range(ahead - tile):
                                capped = math.tanh(s_buffer[row, entry] / cap)
                                s_buffer[row, entry] = cap * capped
                    clear = min(max(mask_from, tile), ahead)
                    seen = masks + (jobs[job, MASK] + clear - mask_from) * 4
                    for line in range(count):
                        for row in range(line * group, (line + 1) * group):
                            at = s + row * PITCH * 4
                            top = row_max(at, ahead - tile, seen, clear - tile)
                            top = max(stats[row, 0], top)
                            shift = top * factor if top > -np.inf else np.float32(0.0)
                            total = weigh(at, at, ahead - tile, factor, shift)
                            if tile > start:
                                past = np.float32(2.0) ** (stats[row, 0] * factor - shift)
                                total += stats[row, 1] * past
                                for dim in range(head_dim):
                                    o_buffer[row, dim] *= past
                            stats[row, 0], stats[row, 1] = top, total
                        seen += (end - mask_from) * 4
                    at = tile
                    while at < ahead:
                        within = at % block_size
                        tokens = min(block_size - within, ahead - at)
                        place = blocks[at // block_size] * block_stride + head_at
                        place += block_size * head_dim
                        place += within * TILE_ROWS if amx else within * head_dim
                        values(
                            s + (at - tile) * held_size, cache + place * size, o, rows, tokens,
                            head_dim, block_size, at > start,
                        )  # fmt: skip
                        at += tokens
                for line in range(count):
                    for member in range(group):
                        at = (first + line) * out_row + (kv_head * group + member) * out_head
                        row = line * group + member
                        total = stats[row, 1]
                        give(
                            o + row * head_dim * 4, out + at * size, head_dim,
                            np.float32(1.0) / total if total > 0 else np.float32(0.0),
                        )  # fmt: skip
        if amx:
            amx_end()

    return attend
