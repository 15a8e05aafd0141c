"""Attention on a CPU over a packed cache, with the same rule of who sees what as `tree_attention`.

Rows are taken in jobs: neighbours of one request that share what is read of its cache. A job reads
entries from a multiple of TILE to a multiple of 32, and its rows' differences are a mask over the
last of them. What a row gets does not depend on its neighbours: an entry that it does not see
weighs exactly nothing. (It is read, though, as by vLLM's own kernel: an entry of the request's
block that was never written must not be NaN.)

Importing this module needs numba.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from .cpu_attention_loop import (
    CHUNK,
    COUNT,
    FIRST,
    FROM,
    MASK,
    MASK_FROM,
    PITCH,
    REQUEST,
    TILE,
    TO,
    attention_loop,
)
from .cpu_packing import GROUP, Packing


class Rows(NamedTuple):
    """What the T rows of R requests see, as numpy arrays."""

    query_start: np.ndarray  # [R+1] int64
    seq_len: np.ndarray  # [R] int32
    prefix_len: np.ndarray  # [≥T] int32
    words: np.ndarray  # [≥T, W] int64
    window_start: np.ndarray  # [≥R] int32


class PackedPlan(NamedTuple):
    """What is the same in every layer of a step.

    Attributes:
        jobs: [J, 7] int64, one line a job.
        mask: [·] fp32, 0 or −inf.
        num_rows: rows from here on belong to no request.
    """

    jobs: np.ndarray
    mask: np.ndarray
    num_rows: int


def rows_of(
    query_start: list[int],
    seq_len: torch.Tensor,
    prefix_len: torch.Tensor,
    words: torch.Tensor,
    window_start: torch.Tensor,
) -> Rows:
    """The same memory for numba: nothing is copied but `query_start`."""
    tensors = seq_len[: len(query_start) - 1], prefix_len, words, window_start
    return Rows(
        np.array(query_start, dtype=np.int64),
        *(x.numpy() for x in tensors),  # a host tensor each
    )


def plan_packed(
    rows: Rows,
    group: int,
    left_out: np.ndarray | None = None,
    prefix_from: torch.Tensor | None = None,
) -> PackedPlan:
    """Cut the rows into jobs.

    Args:
        group: query heads per KV head.
        left_out: [R] bool, requests whose rows are attended by other means.
        prefix_from: [≥T] int32, the first entry of the prefix that a row sees.
    """
    if left_out is None:
        left_out = np.zeros(len(rows.seq_len), dtype=np.bool_)
    windowed = prefix_from is not None
    oldest = rows.prefix_len if prefix_from is None else prefix_from.numpy()  # a host tensor
    jobs, mask = _cut(*rows, max(CHUNK // group, 1), left_out, oldest, windowed)
    return PackedPlan(jobs, mask, rows.query_start[-1])


def attend_packed(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    packing: Packing,
    block_table: torch.Tensor,
    plan: PackedPlan,
    scale: float,
    out: torch.Tensor,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """One layer's attention of the plan's rows; arguments as in `tree_attention`.

    Rows past the plan's last become zeros; those of requests that were left out stay as they are.
    """
    if len(plan.jobs):
        group = query.shape[1] // packing.kv_heads
        attention_loop(packing.element, packing.amx)(
            query.data_ptr(), *query.stride()[:2], out.data_ptr(), *out.stride()[:2],
            kv_cache.data_ptr(), kv_cache.stride(0), packing.head_stride,
            block_table.data_ptr(), block_table.stride(0), plan.mask, plan.jobs,
            packing.kv_heads, group, packing.head_dim, packing.block_size, scale, soft_cap,
            *_scratch(group, packing.head_dim, packing.amx),
        )  # fmt: skip
    if plan.num_rows < len(out):
        out[plan.num_rows :].zero_()
    return out


@lru_cache
def _scratch(group: int, head_dim: int, amx: bool) -> tuple[np.ndarray, ...]:
    """Queries, outputs, scores, the softmax's maxima and sums of a job, and the tiles' shapes."""
    if amx:
        torch.cpu._init_amx()  # asks the kernel for the tile registers, once per process
    rows = -(-max(CHUNK, group) // 16) * 16
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = 64  # bytes in a row of each of 8 tiles
    config[48:56] = 16  # rows of each
    return (
        np.zeros((rows, head_dim), dtype=np.float32), np.zeros((rows, head_dim), dtype=np.float32),
        np.zeros((rows, PITCH), dtype=np.float32), np.zeros((rows, 2), dtype=np.float32), config,
    )  # fmt: skip


@njit(nogil=True)
def find_causal(query_start, seq_len, prefix_len, words, window_start):
    """[R] bool: every row of the request sees all entries up to its own, and no other.

    Prompts, plain decode steps, a root alone, and drafts that form a chain.
    """
    causal = np.ones(len(seq_len), dtype=np.bool_)
    for request in range(len(seq_len)):
        first, last = query_start[request], query_start[request + 1]
        for row in range(first, last):
            wanted = seq_len[request] - (last - row) + 1
            seen, base = prefix_len[row], window_start[request]
            if seen > wanted:
                causal[request] = False
            for word in range(words.shape[1]):
                bits, here = words[row, word], base + word * 64
                if bits == 0:
                    continue
                for bit in range(64):
                    if (bits >> bit) & 1 and here + bit >= seen:
                        if here + bit == seen:
                            seen += 1
                        else:
                            causal[request] = False
            if seen != wanted:
                causal[request] = False
    return causal


@njit(nogil=True)
def _cut(
    query_start, seq_len, prefix_len, words, window_start, most, left_out, oldest, windowed
):  # fmt: skip
    """→ jobs, mask, as in `PackedPlan`; at most `most` rows each."""
    count = 0
    for request in range(len(seq_len)):
        if not left_out[request]:
            count += -(-(query_start[request + 1] - query_start[request]) // most)
    jobs = np.empty((count, 7), dtype=np.int64)
    job, cells = 0, 0
    for request in range(len(seq_len)):
        if left_out[request]:
            continue
        end = query_start[request + 1]
        for first in range(query_start[request], end, most):
            start, clear, to = np.int64(1 << 40), np.int64(1 << 40), np.int64(0)
            last = min(first + most, end)
            for row in range(first, last):
                start, clear = min(start, oldest[row]), min(clear, prefix_len[row])
                seen = np.int64(prefix_len[row])
                for word in range(words.shape[1]):
                    bits = words[row, word]
                    if bits != 0:
                        for bit in range(64):
                            if (bits >> bit) & 1:
                                seen = max(seen, window_start[request] + word * 64 + bit + 1)
                to = max(to, min(seen, seq_len[request]))
            start = min(start, to) // TILE * TILE if windowed else np.int64(0)
            clear = start if windowed else min(clear, to) // GROUP * GROUP
            to = -(-to // GROUP) * GROUP
            jobs[job, FIRST], jobs[job, COUNT], jobs[job, REQUEST] = first, last - first, request
            jobs[job, FROM], jobs[job, MASK_FROM], jobs[job, TO] = start, clear, to
            jobs[job, MASK] = cells
            cells += (to - clear) * (last - first)
            job += 1
    mask = np.empty(cells, dtype=np.float32)
    for job in range(count):
        request, start = jobs[job, REQUEST], jobs[job, MASK_FROM]
        width = jobs[job, TO] - start
        for line in range(jobs[job, COUNT]):
            row, base = jobs[job, FIRST] + line, jobs[job, MASK] + line * width
            begin = oldest[row] if windowed else np.int64(0)
            for entry in range(start, jobs[job, TO]):
                bit = entry - window_start[request]
                seen = begin <= entry < prefix_len[row]
                if 0 <= bit < 64 * words.shape[1] and (words[row, bit // 64] >> (bit % 64)) & 1:
                    seen = True
                seen = seen and entry < seq_len[request]
                mask[base + entry - start] = 0.0 if seen else -np.inf
    return jobs, mask
