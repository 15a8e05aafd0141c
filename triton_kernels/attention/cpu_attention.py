"""Tree attention on a CPU over a packed KV cache.

A job is a group of neighbouring rows of one request that share cache reads. It reads entries from
a multiple of TILE to a multiple of 32, with a mask over the last ones. A row's result does not
depend on its neighbours: masked entries have weight 0. They are read, as by vLLM's own kernel, so
unwritten entries of a block must not be NaN.

The CPU modules of this folder need numba, which vLLM installs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..optional_numba import njit
from .cpu_attention_loop import (
    CACHE,
    CHUNK,
    COUNT,
    FIRST,
    FROM,
    MASK,
    MASK_FROM,
    OUT,
    QUERY,
    REQUEST,
    SINKS,
    TILE,
    TO,
    scratch_size,
    share,
)
from .cpu_packing import ELEMENTS, GROUP, Packing
from .cpu_threads import on_threads, team_size

if TYPE_CHECKING:
    from .tree_attention import ScoreOptions

_LEAST_WORK = 2048
"""Rows × entries of one KV head that justify a thread: some 5 µs."""


class PackedSchedule(NamedTuple):
    """Schedule shared by the layers of a step.

    Attributes:
        jobs: [J, 7] int64, one line a job.
        mask: [·] fp32, 0 or −inf.
        bounds: [threads + 1] int64, range of jobs × KV heads of each thread.
        calls: calls of the loop, by layout of the layer.
    """

    jobs: np.ndarray
    mask: np.ndarray
    bounds: np.ndarray
    calls: dict[Any, LayerCall]


class LayerCall:
    """Loop over a plan's jobs in layers of one layout, with prepared arguments.

    Building the arguments in every layer takes as long as attention to a short context.

    Args (strides in elements):
        query_stride, out_stride: of [T, heads, D].
        block_stride: of the cache.
        value_scale: factor of stored values.
        element: `ELEMENTS` of query and output.
        group: query heads per KV head.
        block_table: [R, max blocks] int32, the same in all layers.
    """

    def __init__(
        self,
        plan: PackedSchedule,
        query_stride: tuple[int, ...],
        out_stride: tuple[int, ...],
        block_stride: int,
        packing: Packing,
        scale: float,
        soft_cap: float,
        value_scale: float,
        element: int,
        group: int,
        block_table: torch.Tensor,
    ):
        self.threads = len(plan.bounds) - 1
        scratch, config = _scratch(group, packing.head_dim, packing.amx, self.threads)
        numbers = [0, *query_stride[:2], 0, *out_stride[:2], 0, block_stride, packing.head_stride]
        numbers += [block_table.data_ptr(), block_table.stride(0)]
        numbers += [x.ctypes.data for x in (plan.mask, plan.jobs, plan.bounds)]
        numbers += [self.threads, packing.kv_heads, group, packing.head_dim, packing.block_size]
        numbers += [0, 0, scratch.ctypes.data, scratch.shape[1], config.ctypes.data, 0, 0]
        numbers += [element, packing.element, packing.amx]
        self.arguments = np.array(numbers)
        reals = self.arguments.view(np.float64)
        reals[19:21], reals[24] = (scale, soft_cap), value_scale
        self.address = self.arguments.ctypes.data

    def __call__(self, query: int, out: int, cache: int, sinks: int) -> None:
        """Attend a layer, by addresses of its tensors; sinks: 0 if it has none."""
        self.arguments[QUERY], self.arguments[OUT], self.arguments[CACHE] = query, out, cache
        self.arguments[SINKS] = sinks
        on_threads(share, self.address, self.threads)


def attend_batch(
    batch: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    packing: Packing,
    window: int | None,
    options: ScoreOptions,
    causal_elsewhere: bool,
) -> torch.Tensor:
    """Run the attention of one layer; arguments as in `TreeAttentionBatch.attend`.

    Rows behind the last request's become zeros; rows of requests that are attended elsewhere are
    unchanged.
    """
    kv_heads, stop = packing.kv_heads, batch.query_start_host[-1]
    group = query.shape[1] // kv_heads

    def make() -> PackedSchedule:
        requests = len(batch.query_start_host) - 1
        left_out = batch.causal() if causal_elsewhere else np.zeros(requests, dtype=np.bool_)
        seen = batch.see(window)
        oldest = batch.prefix_len if window is None else seen.prefix_from
        oldest = oldest.numpy()  # a host tensor
        rows = *_rows(batch, seen.mask_words), max(CHUNK // group, 1), left_out, oldest
        jobs, mask = _cut(*rows, window is not None)
        return PackedSchedule(jobs, mask, _share(jobs, kv_heads, team_size()), {})

    plan = batch.once((window, group, kv_heads, causal_elsewhere), make)
    if len(plan.jobs):
        scale, value_scale, sinks = options.scale, 1.0, options.sinks
        if options.key_scale is not None and options.value_scale is not None:
            scale *= options.key_scale.item()  # a host tensor
            value_scale = options.value_scale.item()  # a host tensor
        strides, element = (query.stride(), out.stride(), kv_cache.stride(0)), ELEMENTS[query.dtype]
        layout = *strides, packing, scale, options.soft_cap, value_scale, element
        call = plan.calls.get(layout)
        if call is None:
            call = plan.calls[layout] = LayerCall(plan, *layout, group, batch.block_table)
        at = 0 if sinks is None else sinks.data_ptr()
        call(query.data_ptr(), out.data_ptr(), kv_cache.data_ptr(), at)
    if stop < len(out):
        out[stop:].zero_()
    return out


def causal_requests(batch: Any) -> np.ndarray:
    """Return [R] bool, requests with causal rows only; computed once per batch."""
    return batch.once("causal", lambda: _find_causal(*_rows(batch, batch.mask_words)))


def _rows(batch: Any, mask_words: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return the visible entries of a batch's rows as numpy arrays, of which only the first is new.

    Returns:
        query_start [R+1] int64, seq_len [R] int32, prefix_len [≥T] int32, mask_words [≥T, W]
        int64, tree_start [≥R] int32.
    """
    start = np.array(batch.query_start_host)
    tensors = batch.seq_len[: len(start) - 1], batch.prefix_len, mask_words, batch.tree_start
    return start, *(x.numpy() for x in tensors)  # a host tensor each


@lru_cache
def _scratch(group: int, head_dim: int, amx: bool, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the threads' scratch memory and the AMX tile config."""
    if amx:
        torch.cpu._init_amx()  # requests the tile registers from Linux, once per process
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = 64  # bytes in a row of each of 8 tiles
    config[48:56] = 16  # rows of each
    return np.zeros((threads, scratch_size(group, head_dim)), dtype=np.float32), config


@njit
def _share(jobs, kv_heads, threads):
    """Return [threads + 1] int64, ranges of jobs × KV heads of about equal time.

    Small work uses fewer threads.
    """
    work = jobs[:, COUNT] * (jobs[:, TO] - jobs[:, FROM])
    items, total = len(jobs) * kv_heads, work.sum() * kv_heads
    threads = max(min(threads, items, total // _LEAST_WORK), 1)
    bounds = np.full(threads + 1, items)
    done, thread = 0, 0
    for item in range(items):
        while thread < threads and done >= thread * (total / threads):
            bounds[thread] = item
            thread += 1
        done += work[item // kv_heads]
    return bounds


@njit
def _find_causal(query_start, seq_len, prefix_len, mask_words, tree_start):
    """Return [R] bool: causal requests without drafts (prompts, plain decode steps, single roots).

    Chains of drafts are excluded: for two to a dozen rows our loop is faster than vLLM's kernel.
    """
    causal = np.ones(len(seq_len), dtype=np.bool_)
    for request in range(len(seq_len)):
        first, last = query_start[request], query_start[request + 1]
        for row in range(first, last):
            seen = np.int64(prefix_len[row])
            seen += mask_words[row, 0] & 1 and tree_start[request] == seen
            drafts = np.any(mask_words[row, 1:]) or mask_words[row, 0] & ~np.int64(1)
            if drafts or seen != seq_len[request] - (last - row) + 1:
                causal[request] = False
    return causal


@njit
def _cut(
    query_start, seq_len, prefix_len, mask_words, tree_start, most, left_out, oldest, windowed
):
    """Return jobs and mask, see `PackedSchedule`; at most `most` rows each."""
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
                for word in range(mask_words.shape[1]):
                    bits = mask_words[row, word]
                    if bits != 0:
                        for bit in range(64):
                            if (bits >> bit) & 1:
                                seen = max(seen, tree_start[request] + word * 64 + bit + 1)
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
                bit = entry - tree_start[request]
                seen = begin <= entry < prefix_len[row]
                if (
                    0 <= bit < 64 * mask_words.shape[1]
                    and (mask_words[row, bit // 64] >> (bit % 64)) & 1
                ):
                    seen = True  # type: ignore[assignment]
                seen = seen and entry < seq_len[request]
                mask[base + entry - start] = 0.0 if seen else -np.inf
    return jobs, mask
