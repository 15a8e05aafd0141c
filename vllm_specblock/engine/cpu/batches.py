"""The bookkeeping of Model Runner V2 around a step, in torch, for CPUs; see `kernels.py`."""

from __future__ import annotations

import itertools

import torch


def flatten_sampled(flat, sampled, _0, num_sampled, first_row, num_warps=1):
    for request, (start, count) in enumerate(zip(first_row.tolist(), num_sampled.tolist())):
        flat[start : start + count] = sampled[request, :count]


def gather_drafts(
    draft, position, input_ids, positions, rows, slot, node, prefill_len, num_rows, BLOCK_SIZE
):
    position.copy_(positions[rows])
    placeholder = (node > 0) & (position - node < prefill_len[slot])
    draft.copy_(input_ids[rows].masked_fill(placeholder, -1))


def prefill_inputs(
    input_ids, lookahead, _0, num_lookahead, slot, query_start, all_token_ids, _1, prefill_len,
    num_computed, BLOCK_SIZE, LOOKAHEAD_BLOCK,
):  # fmt: skip
    starts = query_start.tolist()
    for request, at in enumerate(slot.tolist()):
        done, length = int(num_computed[at]), int(prefill_len[at])
        if done >= length:
            continue
        start, end = starts[request], starts[request + 1]
        after = done + end - start
        input_ids[start:end] = all_token_ids[at, done:after]
        for ahead in range(num_lookahead):
            inside = after + ahead < length
            lookahead[ahead, at] = all_token_ids[at, after + ahead] if inside else 0


def positions_and_lengths(
    positions, seq_lens, slot, query_start, num_computed, max_num_reqs, BLOCK_SIZE
):
    starts, done = query_start.tolist(), num_computed[slot].tolist()
    seq_lens[len(done) : max_num_reqs] = 0
    for request, (start, end) in enumerate(itertools.pairwise(starts[: len(done) + 1])):
        first = done[request]
        seq_lens[request] = first + end - start
        torch.arange(first, first + end - start, out=positions[start:end])


def combine_drafts(
    input_ids, slot, last_sampled, query_start, seq_lens, prefill_len, drafts, _0, first_row,
    rows, BLOCK_SIZE, NUM_NEW_SAMPLED_TOKENS=1,
):  # fmt: skip
    starts, bounds = query_start.tolist(), first_row.tolist()
    for request, at in enumerate(slot.tolist()):
        count = bounds[request + 1] - bounds[request]
        end = starts[request + 1]
        num_drafts = count - NUM_NEW_SAMPLED_TOKENS
        torch.arange(end - count, end, out=rows[bounds[request] : bounds[request + 1]])
        length, prefill = int(seq_lens[request]), int(prefill_len[at])
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS and length - count >= prefill:
            input_ids[end - count] = last_sampled[at, 0]
        if num_drafts:
            input_ids[end - num_drafts : end] = drafts[at, :num_drafts]


def sampled_and_rejected(num_sampled, num_rejected, seq_lens, first_row, slot, prefill_len):
    count = len(num_sampled)
    unfinished = seq_lens[:count] < prefill_len[slot]
    num_sampled.masked_fill_(unfinished, 0)
    rows = first_row[1 : count + 1] - first_row[:count]
    num_rejected.copy_((rows - num_sampled).masked_fill(unfinished, 0))


def post_update(
    slot, num_computed, last_sampled, output_counts, _0, sampled, _1, num_sampled, num_rejected,
    query_start, all_token_ids, _2, total_len, num_warps=1,
):  # fmt: skip
    starts = query_start.tolist() if query_start is not None else None
    counts, rejected = num_sampled.tolist(), num_rejected.tolist()
    for request, at in enumerate(slot.tolist()):
        if at < 0:
            continue
        count, length = counts[request], int(total_len[at])
        if count:
            tokens = sampled[request, :count]
            last_sampled[at] = tokens[-1]
            total_len[at] = length + count
            all_token_ids[at, length : length + count] = tokens
            if output_counts is not None:
                output_counts[at].index_add_(0, tokens, torch.ones(count, dtype=torch.int32))
        queries = starts[request + 1] - starts[request] if starts is not None else 0
        num_computed[at] += queries - rejected[request]


def expand_slots(slot, expanded, node, first_row, BLOCK_SIZE):
    bounds = first_row.tolist()
    for request, at in enumerate(slot.tolist()):
        start, end = bounds[request], bounds[request + 1]
        expanded[start:end] = at
        torch.arange(end - start, out=node[start:end])


def apply_write(output, _0, rows, starts, contents, ends, groups, BLOCK_SIZE, MULTI_GROUP):
    if MULTI_GROUP:
        raise NotImplementedError("Writes of several groups go tensor by tensor on a CPU.")
    flat = output.view(len(output), -1)
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        flat[row, start : start + end - begin] = contents[begin:end]
        begin = end
