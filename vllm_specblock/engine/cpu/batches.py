"""The bookkeeping of Model Runner V2 around a step as compiled loops, for CPUs; see `kernels.py`.

A step launches a dozen of these on a handful of numbers each: as torch calls they would cost more
than what they do.
"""

from __future__ import annotations

import torch

from vllm_specblock.triton_kernels.optional_numba import njit


def flatten_sampled(flat, sampled, _0, num_sampled, first_row, num_warps=1):
    for request, (start, count) in enumerate(zip(first_row.tolist(), num_sampled.tolist())):
        flat[start : start + count] = sampled[request, :count]


def gather_drafts(
    draft, position, input_ids, positions, rows, req_idx, node, prefill_len, num_rows, BLOCK_SIZE
):
    _gather_drafts(
        *_arrays(draft, position, input_ids, positions, rows, req_idx, node, prefill_len)
    )


@njit
def _gather_drafts(draft, position, input_ids, positions, rows, req_idx, node, prefill_len):
    for i in range(len(rows)):
        at = positions[rows[i]]
        position[i] = at
        placeholder = node[i] > 0 and at - node[i] < prefill_len[req_idx[i]]
        draft[i] = -1 if placeholder else input_ids[rows[i]]


def prefill_inputs(
    input_ids, lookahead, _0, num_lookahead, req_idx, query_start, all_token_ids, _1, prefill_len,
    num_computed, BLOCK_SIZE, LOOKAHEAD_BLOCK,
):  # fmt: skip
    _prefill_inputs(
        *_arrays(
            input_ids, lookahead, req_idx, query_start, all_token_ids, prefill_len, num_computed
        ),
        num_lookahead,
    )


@njit
def _prefill_inputs(
    input_ids, lookahead, req_idx, query_start, all_token_ids, prefill_len, num_computed,
    num_lookahead,
):  # fmt: skip
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
    positions, seq_lens, req_idx, query_start, num_computed, max_num_reqs, BLOCK_SIZE
):
    _positions_and_lengths(
        *_arrays(positions, seq_lens, req_idx, query_start, num_computed), max_num_reqs
    )


@njit
def _positions_and_lengths(positions, seq_lens, req_idx, query_start, num_computed, max_num_reqs):
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
    input_ids, req_idx, last_sampled, query_start, seq_lens, prefill_len, drafts, _0, first_row,
    rows, BLOCK_SIZE, NUM_NEW_SAMPLED_TOKENS=1,
):  # fmt: skip
    _combine_drafts(
        *_arrays(
            input_ids, req_idx, last_sampled, query_start, seq_lens, prefill_len, drafts, first_row,
            rows,
        ),
        NUM_NEW_SAMPLED_TOKENS,
    )  # fmt: skip


@njit
def _combine_drafts(
    input_ids, req_idx, last_sampled, query_start, seq_lens, prefill_len, drafts, first_row, rows,
    num_new,
):  # fmt: skip
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


def sampled_and_rejected(num_sampled, num_rejected, seq_lens, first_row, req_idx, prefill_len):
    _sampled_and_rejected(
        *_arrays(num_sampled, num_rejected, seq_lens, first_row, req_idx, prefill_len)
    )


@njit
def _sampled_and_rejected(num_sampled, num_rejected, seq_lens, first_row, req_idx, prefill_len):
    for request in range(len(num_sampled)):
        if seq_lens[request] < prefill_len[req_idx[request]]:
            num_sampled[request] = num_rejected[request] = 0
        else:
            rows = first_row[request + 1] - first_row[request]
            num_rejected[request] = rows - num_sampled[request]


def post_update(
    req_idx, num_computed, last_sampled, output_counts, _0, sampled, _1, num_sampled, num_rejected,
    query_start, all_token_ids, _2, total_len, num_warps=1,
):  # fmt: skip
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
    req_idx,
    num_computed,
    last_sampled,
    output_counts,  # empty: nobody counts
    sampled,
    num_sampled,
    num_rejected,
    query_start,  # empty: nothing was computed
    all_token_ids,
    total_len,
):
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


def expand_slots(req_idx, expanded, node, first_row, BLOCK_SIZE):
    _expand_slots(*_arrays(req_idx, expanded, node, first_row))


@njit
def _expand_slots(req_idx, expanded, node, first_row):
    for request in range(len(req_idx)):
        first = first_row[request]
        for i in range(first_row[request + 1] - first):
            expanded[first + i] = req_idx[request]
            node[first + i] = i


def apply_write(output, _0, rows, starts, contents, ends, groups, BLOCK_SIZE, MULTI_GROUP):
    if MULTI_GROUP:
        raise NotImplementedError("Writes of several groups go tensor by tensor on a CPU.")
    flat = output.view(len(output), -1)
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        flat[row, start : start + end - begin] = contents[begin:end]
        begin = end


def slot_mapping(
    slots: torch.Tensor,
    req_idx: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
) -> None:
    """Where each row's keys and values go.

    Args:
        slots: [T] int64, written: −1 for rows of nobody and behind the last.
        req_idx: [R] integers; negative: nobody's.
        query_start: [≥ R+1] int32.
        positions: [≥ rows] int64.
        table: [S, max blocks] int32.
    """
    _slot_mapping(*_arrays(slots, req_idx, query_start, positions, table), block_size)


@njit
def _slot_mapping(slots, req_idx, query_start, positions, table, block_size):
    slots[query_start[len(req_idx)] :] = -1
    for request in range(len(req_idx)):
        at = req_idx[request]
        for row in range(query_start[request], query_start[request + 1]):
            block, inside = positions[row] // block_size, positions[row] % block_size
            slots[row] = table[at, block] * block_size + inside if at >= 0 else -1


def _arrays(*tensors: torch.Tensor):
    return (tensor.numpy() for tensor in tensors)
