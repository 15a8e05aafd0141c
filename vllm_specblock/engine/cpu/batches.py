"""The bookkeeping of Model Runner V2 around a step as compiled loops, for CPUs; see `kernels.py`.

A step launches a dozen of these on a handful of numbers each: as torch calls they would cost more
than what they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from vllm_specblock.triton_kernels.optional_numba import njit

Array = npt.NDArray[Any]


def flatten_sampled(
    flat: Tensor, sampled: Tensor, _0: int, num_sampled: Tensor, first_row: Tensor,
    num_warps: int = 1,
) -> None:  # fmt: skip
    for request, (start, count) in enumerate(zip(first_row.tolist(), num_sampled.tolist())):
        flat[start : start + count] = sampled[request, :count]


def gather_drafts(
    draft: Tensor, position: Tensor, input_ids: Tensor, positions: Tensor, rows: Tensor,
    req_idx: Tensor, node: Tensor, prefill_len: Tensor, num_rows: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _gather_drafts(
        *_arrays(draft, position, input_ids, positions, rows, req_idx, node, prefill_len)
    )


@njit
def _gather_drafts(
    draft: Array, position: Array, input_ids: Array, positions: Array, rows: Array, req_idx: Array,
    node: Array, prefill_len: Array,
) -> None:  # fmt: skip
    for i in range(len(rows)):
        at = positions[rows[i]]
        position[i] = at
        placeholder = node[i] > 0 and at - node[i] < prefill_len[req_idx[i]]
        draft[i] = -1 if placeholder else input_ids[rows[i]]


def prefill_inputs(
    input_ids: Tensor, lookahead: Tensor, _0: int, num_lookahead: int, req_idx: Tensor,
    query_start: Tensor, all_token_ids: Tensor, _1: int, prefill_len: Tensor, num_computed: Tensor,
    BLOCK_SIZE: int, LOOKAHEAD_BLOCK: int,
) -> None:  # fmt: skip
    _prefill_inputs(
        *_arrays(
            input_ids, lookahead, req_idx, query_start, all_token_ids, prefill_len, num_computed
        ),
        num_lookahead,
    )


@njit
def _prefill_inputs(
    input_ids: Array, lookahead: Array, req_idx: Array, query_start: Array, all_token_ids: Array,
    prefill_len: Array, num_computed: Array, num_lookahead: int,
) -> None:  # fmt: skip
    for request in range(len(req_idx)):
        at = req_idx[request]
        done, length = num_computed[at], prefill_len[at]
        if done >= length:
            continue
        start, end = query_start[request], query_start[request + 1]
        after = done + end - start
        for i in range(end - start):
            input_ids[start + i] = all_token_ids[at, done + i]
        for ahead in range(num_lookahead):
            inside = after + ahead < length
            lookahead[ahead, at] = all_token_ids[at, after + ahead] if inside else 0


def positions_and_lengths(
    positions: Tensor, seq_lens: Tensor, req_idx: Tensor, query_start: Tensor, num_computed: Tensor,
    max_num_reqs: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    _positions_and_lengths(
        *_arrays(positions, seq_lens, req_idx, query_start, num_computed), max_num_reqs
    )


@njit
def _positions_and_lengths(
    positions: Array, seq_lens: Array, req_idx: Array, query_start: Array, num_computed: Array,
    max_num_reqs: int,
) -> None:  # fmt: skip
    for request in range(max_num_reqs):
        if request >= len(req_idx):
            seq_lens[request] = 0
            continue
        first, start = num_computed[req_idx[request]], query_start[request]
        count = query_start[request + 1] - start
        seq_lens[request] = first + count
        for i in range(count):
            positions[start + i] = first + i


def combine_drafts(
    input_ids: Tensor, req_idx: Tensor, last_sampled: Tensor, query_start: Tensor, seq_lens: Tensor,
    prefill_len: Tensor, drafts: Tensor, _0: int, first_row: Tensor, rows: Tensor, BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:  # fmt: skip
    _combine_drafts(
        *_arrays(
            input_ids, req_idx, last_sampled, query_start, seq_lens, prefill_len, drafts, first_row,
            rows,
        ),
        NUM_NEW_SAMPLED_TOKENS,
    )  # fmt: skip


@njit
def _combine_drafts(
    input_ids: Array, req_idx: Array, last_sampled: Array, query_start: Array, seq_lens: Array,
    prefill_len: Array, drafts: Array, first_row: Array, rows: Array, num_new: int,
) -> None:  # fmt: skip
    for request in range(len(req_idx)):
        at, first = req_idx[request], first_row[request]
        count, end = first_row[request + 1] - first, query_start[request + 1]
        num_drafts = count - num_new
        for i in range(count):
            rows[first + i] = end - count + i
        length, prefill = seq_lens[request], prefill_len[at]
        if length <= prefill:
            continue
        if num_new and length - count >= prefill:
            input_ids[end - count] = last_sampled[at, 0]
        for i in range(num_drafts):
            input_ids[end - num_drafts + i] = drafts[at, i]


def sampled_and_rejected(
    num_sampled: Tensor, num_rejected: Tensor, seq_lens: Tensor, first_row: Tensor, req_idx: Tensor,
    prefill_len: Tensor,
) -> None:  # fmt: skip
    _sampled_and_rejected(
        *_arrays(num_sampled, num_rejected, seq_lens, first_row, req_idx, prefill_len)
    )


@njit
def _sampled_and_rejected(
    num_sampled: Array, num_rejected: Array, seq_lens: Array, first_row: Array, req_idx: Array,
    prefill_len: Array,
) -> None:  # fmt: skip
    for request in range(len(num_sampled)):
        if seq_lens[request] < prefill_len[req_idx[request]]:
            num_sampled[request] = num_rejected[request] = 0
        else:
            rows = first_row[request + 1] - first_row[request]
            num_rejected[request] = rows - num_sampled[request]


def post_update(
    req_idx: Tensor, num_computed: Tensor, last_sampled: Tensor, output_counts: Tensor | None,
    _0: int, sampled: Tensor, _1: int, num_sampled: Tensor, num_rejected: Tensor,
    query_start: Tensor | None, all_token_ids: Tensor, _2: int, total_len: Tensor,
    draft: Tensor | None = None, draft_out: Tensor | None = None, num_drafts: int = 0,
    num_warps: int = 1,
) -> None:  # fmt: skip
    """The drafts, from 0.33 on, are those that the last rank of a pipeline has sent."""
    if draft is not None and draft_out is not None:
        owned = req_idx >= 0
        draft_out[req_idx[owned].long()] = draft[owned].to(draft_out.dtype)
    none = torch.empty(0, dtype=torch.int32)
    counts = none[:, None] if output_counts is None else output_counts
    _post_update(
        *_arrays(
            req_idx, num_computed, last_sampled, counts, sampled, num_sampled, num_rejected,
            none if query_start is None else query_start, all_token_ids, total_len,
        )
    )  # fmt: skip


@njit
def _post_update(
    req_idx: Array,
    num_computed: Array,
    last_sampled: Array,
    output_counts: Array,  # empty: not counted
    sampled: Array,
    num_sampled: Array,
    num_rejected: Array,
    query_start: Array,  # empty: nothing was computed
    all_token_ids: Array,
    total_len: Array,
) -> None:
    for request in range(len(req_idx)):
        at, count = req_idx[request], num_sampled[request]
        if at < 0:
            continue
        if count > 0:
            length = total_len[at]
            for i in range(count):
                token = sampled[request, i]
                if length + i < all_token_ids.shape[1]:
                    all_token_ids[at, length + i] = token
                if len(output_counts):
                    output_counts[at, token] += 1
            last_sampled[at, 0] = sampled[request, count - 1]
            total_len[at] = length + count
        if len(query_start):
            num_computed[at] += query_start[request + 1] - query_start[request]
        num_computed[at] -= num_rejected[request]


def expand_slots(
    req_idx: Tensor, expanded: Tensor, node: Tensor, first_row: Tensor, BLOCK_SIZE: int
) -> None:
    _expand_slots(*_arrays(req_idx, expanded, node, first_row))


@njit
def _expand_slots(req_idx: Array, expanded: Array, node: Array, first_row: Array) -> None:
    for request in range(len(req_idx)):
        first = first_row[request]
        for i in range(first_row[request + 1] - first):
            expanded[first + i] = req_idx[request]
            node[first + i] = i


def apply_write(
    output: Tensor, _0: int, rows: Tensor, starts: Tensor, contents: Tensor, ends: Tensor,
    groups: Tensor, BLOCK_SIZE: int, MULTI_GROUP: bool,
) -> None:  # fmt: skip
    if MULTI_GROUP:
        raise NotImplementedError("Writes of several groups go tensor by tensor on a CPU.")
    flat = output.view(len(output), -1)
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        flat[row, start : start + end - begin] = contents[begin:end]
        begin = end


def slot_mapping(
    slots: Tensor, req_idx: Tensor, query_start: Tensor, positions: Tensor,
    table: Tensor, block_size: int,
) -> None:  # fmt: skip
    """Where each row's keys and values go.

    Args:
        slots: [T] int64, written: −1 for rows of no request and after the last.
        req_idx: [R] integers; negative: no request.
        query_start: [≥ R+1] int32.
        positions: [≥ rows] int64.
        table: [S, max blocks] int32.
    """
    _slot_mapping(*_arrays(slots, req_idx, query_start, positions, table), block_size)


@njit
def _slot_mapping(
    slots: Array, req_idx: Array, query_start: Array, positions: Array, table: Array,
    block_size: int,
) -> None:  # fmt: skip
    slots[query_start[len(req_idx)] :] = -1
    for request in range(len(req_idx)):
        at = req_idx[request]
        for row in range(query_start[request], query_start[request + 1]):
            block, inside = positions[row] // block_size, positions[row] % block_size
            slots[row] = table[at, block] * block_size + inside if at >= 0 else -1


def _arrays(*tensors: Tensor) -> Iterator[Array]:
    return map(Tensor.numpy, tensors)
