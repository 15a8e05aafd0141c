"""Inner loop of tree attention on a CPU, over a packed KV cache.

`cpu_attention.py` makes the schedule; `cpu_vectors.py` has the vector instructions.
"""

from __future__ import annotations

import math

import numpy as np

from ..optional_numba import njit
from .cpu_vectors import (
    BF16,
    BYTES,
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
    view,
)

CHUNK = 64  # query rows × heads of one KV head that share what is read of the cache, if they fit
TILE = 1024  # entries whose scores are held at once
PITCH = TILE + 16  # from row to row: at 4096 bytes all rows of a tile would share one set of L1
LOG2E = np.float32(1.4426950408889634)
# The columns of `jobs`: first row, rows, request, entries from … to, the mask's first entry and its
# place.
FIRST, COUNT, REQUEST, FROM, MASK_FROM, TO, MASK = range(7)
QUERY, OUT, CACHE, SINKS = 0, 3, 6, 25  # indices of addresses in the loop's arguments


@njit
def rows_at_once(group: int) -> int:
    """Return the maximum query rows × heads of one KV head in a job."""
    return -(-max(CHUNK, group) // 16) * 16


def scratch_size(group: int, head_dim: int) -> int:
    """Return the fp32 scratch numbers of a thread: queries, outputs, scores, maxima and sums."""
    return rows_at_once(group) * (2 * head_dim + PITCH + 2)


@njit(error_model="numpy")
def scores(q, keys, c, rows, tokens, head_dim, block_size, stored, amx):
    """c [rows, PITCH] = q [rows, D] · the keys of `tokens` entries of one block."""
    for token in range(0, tokens, COLUMNS):
        for row in range(0, rows, TILE_ROWS if amx else ROWS):
            at = c + (row * PITCH + token) * 4
            if amx:
                line = head_dim * 2
                a, b = q + row * line, keys + token * line
                amx_multiply(a, line, b, 16 * line, at, PITCH * 4, head_dim // 32, 0)
            else:
                a, b = q + row * head_dim * 4, keys + token * BYTES[stored]
                multiply(stored, a, head_dim, b, block_size, at, PITCH, head_dim, 0)


@njit(error_model="numpy")
def values(p, values, o, rows, tokens, head_dim, block_size, add, stored, amx):
    """o [rows, D] (+)= p [rows, PITCH] · the values of `tokens` entries of one block."""
    for dim in range(0, head_dim, COLUMNS):
        for row in range(0, rows, TILE_ROWS if amx else ROWS):
            a, at = p + row * PITCH * 4, o + (row * head_dim + dim) * 4
            if amx:
                line = block_size * 2
                b = values + dim * line
                amx_multiply(a, PITCH * 4, b, 16 * line, at, head_dim * 4, tokens // 32, add)
            else:
                b = values + dim * BYTES[stored]
                multiply(stored, a, PITCH, b, head_dim, at, head_dim, tokens, add)


@njit(error_model="numpy")
def attend(
    query,  # address, strides of rows and heads in elements; as the two after it
    out,
    cache,  # address, strides of blocks and KV heads
    table,  # address and row stride of [R, blocks] int32
    masks,  # address of [·] fp32
    line,  # of `jobs`
    kv_head,
    sizes,  # group, head_dim, block_size
    factors,  # scale, soft cap, value scale
    scratch,
    sinks,  # address of [heads] fp32, or 0
    layout,  # `BF16` etc. of query and output, and of the cache; whether it is packed for AMX
):
    """Attend the rows of one job for the query heads of one KV head."""
    group, head_dim, block_size = sizes
    element, stored, amx = layout
    held = BF16 if amx else FP32  # queries and weights in the layout of the products
    size, stored_size, held_size = BYTES[element], BYTES[stored], BYTES[held]
    scale, soft_cap, value_scale = factors
    most = rows_at_once(group)
    q, o = scratch, scratch + most * head_dim * 4
    s = o + most * head_dim * 4
    outputs, products = view(o, most * head_dim, np.float32), view(s, most * PITCH, np.float32)
    tops = view(s + most * PITCH * 4, most, np.float32)
    totals = view(s + most * (PITCH + 1) * 4, most, np.float32)
    factor = np.float32(scale) * LOG2E
    cap = np.float32(soft_cap / scale)  # of the products before `scale`
    first, count = line[FIRST], line[COUNT]
    start, end, mask_from = line[FROM], line[TO], line[MASK_FROM]
    rows, blocks = count * group, view(table[0] + line[REQUEST] * table[1] * 4, end, np.int32)
    head_at = kv_head * cache[2]
    for row in range(rows):
        head = kv_head * group + row % group
        at = (first + row // group) * query[1] + head * query[2]
        x, row_at = query[0] + at * size, q + row * head_dim * held_size
        scale_row(element, held, x, row_at, head_dim, np.float32(1.0))
        tops[row], totals[row] = -np.inf, 0.0
    if start == end:
        outputs[: rows * head_dim] = 0.0
    for tile in range(start, end, TILE):
        ahead = min(tile + TILE, end)
        at = tile
        while at < ahead:
            within = at % block_size
            tokens = min(block_size - within, ahead - at)
            place = blocks[at // block_size] * cache[1] + head_at
            # `within` is a multiple of 32.
            place += within * head_dim if amx else within
            keys, to = cache[0] + place * stored_size, s + (at - tile) * 4
            scores(q, keys, to, rows, tokens, head_dim, block_size, stored, amx)
            at += tokens
        if cap > 0:
            for row in range(rows):
                for entry in range(row * PITCH, row * PITCH + ahead - tile):
                    products[entry] = cap * math.tanh(products[entry] / cap)
        clear = min(max(mask_from, tile), ahead)
        seen = masks + (line[MASK] + clear - mask_from) * 4
        for row in range(rows):
            at = s + row * PITCH * 4
            mask = seen + row // group * (end - mask_from) * 4
            top = max(tops[row], row_max(at, ahead - tile, mask, clear - tile))
            shift = top * factor if top > -np.inf else np.float32(0.0)
            total = row_exp2(held, at, at, ahead - tile, factor, shift)
            if tile > start:
                past = np.float32(2.0) ** (tops[row] * factor - shift)
                total += totals[row] * past
                for dim in range(row * head_dim, (row + 1) * head_dim):
                    outputs[dim] *= past
            tops[row], totals[row] = top, total
        at = tile
        while at < ahead:
            within = at % block_size
            tokens = min(block_size - within, ahead - at)
            place = blocks[at // block_size] * cache[1] + head_at
            place += block_size * head_dim
            place += within * TILE_ROWS if amx else within * head_dim
            weights, held_values = s + (at - tile) * held_size, cache[0] + place * stored_size
            place, add = (o, rows, tokens, head_dim, block_size), at > start
            values(weights, held_values, *place, add, stored, amx)
            at += tokens
    for row in range(rows):
        head = kv_head * group + row % group
        at = (first + row // group) * out[1] + head * out[2]
        total, past = totals[row], np.float32(value_scale)
        if sinks != 0:  # an extra score with value zero
            sink = view(sinks + head * 4, 1, np.float32)[0] * LOG2E
            top = max(sink, tops[row] * factor)
            decay = np.float32(2.0) ** (tops[row] * factor - top)
            total = total * decay + np.float32(2.0) ** (sink - top)
            past *= decay
        past = past / total if total > 0 else np.float32(0.0)
        scale_row(FP32, element, o + row * head_dim * 4, out[0] + at * size, head_dim, past)


@njit(error_model="numpy")
def share(arguments, thread, threads):
    """Process one thread's range of jobs × KV heads."""
    a, d = view(arguments, 29, np.int64), view(arguments, 29, np.float64)
    query, out, cache = (a[0], a[1], a[2]), (a[3], a[4], a[5]), (a[6], a[7], a[8])
    jobs, bounds, parts, kv_heads = a[12], a[13], a[14], a[15]
    sizes, factors = (a[16], a[17], a[18]), (d[19], d[20], d[24])
    table, scratch = (a[9], a[10]), a[21] + thread * a[22] * 4
    layout, amx = (a[26], a[27], a[28]), a[28]
    if amx:
        amx_begin(a[23])
    for part in range(thread, parts, threads):
        bound = view(bounds + part * 8, 2, np.int64)
        for unit in range(bound[0], bound[1]):
            line, head = view(jobs + unit // kv_heads * 7 * 8, 7, np.int64), unit % kv_heads
            places = query, out, cache, table, a[11], line, head
            attend(*places, sizes, factors, scratch, a[25], layout)
    if amx:
        amx_end()
