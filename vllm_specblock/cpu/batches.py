"""Compiled loops for Model Runner V2's bookkeeping around a step; see `kernels.py`.

A step runs a dozen of these on a few numbers each; torch calls would cost more.
"""

from __future__ import annotations

from ctypes import memset
from itertools import product

from vllm_specblock.cpu.kernels import replaces_kernel


@replaces_kernel("gpu.spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(flat_sampled, sampled, num_sampled, cu_num_logits):
    counts = zip(cu_num_logits.tolist(), num_sampled.tolist())
    for request, (start, count) in enumerate(counts):
        flat_sampled[start : start + count] = sampled[request, :count]


@replaces_kernel("gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel", compiled=True)
def gather_drafts(
    draft_sampled, pos, input_ids, positions, logits_indices, expanded_idx_mapping,
    expanded_local_pos, prefill_len,
):  # fmt: skip
    for i in range(len(logits_indices)):
        row, node = logits_indices[i], expanded_local_pos[i]
        pos[i] = positions[row]
        placeholder = node > 0 and positions[row] - node < prefill_len[expanded_idx_mapping[i]]
        draft_sampled[i] = -1 if placeholder else input_ids[row]


@replaces_kernel("gpu.input_batch._prepare_prefill_inputs_kernel", compiled=True)
def prefill_inputs(
    input_ids, next_prefill_tokens, num_lookahead, idx_mapping, query_start_loc, all_token_ids,
    prefill_lens, num_computed_tokens,
):  # fmt: skip
    for request in range(len(idx_mapping)):
        at = idx_mapping[request]
        done, length = num_computed_tokens[at], prefill_lens[at]
        if done >= length:
            continue
        start, end = query_start_loc[request], query_start_loc[request + 1]
        after = done + end - start
        input_ids[start:end] = all_token_ids[at, done:after]
        for ahead in range(num_lookahead):
            inside = after + ahead < length
            next_prefill_tokens[ahead, at] = all_token_ids[at, after + ahead] if inside else 0


@replaces_kernel("gpu.input_batch._prepare_pos_seq_lens_kernel", compiled=True)
def positions_and_lengths(
    pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens, max_num_reqs
):
    for request in range(max_num_reqs):
        if request >= len(idx_mapping):
            seq_lens[request] = 0
            continue
        first, start = num_computed_tokens[idx_mapping[request]], query_start_loc[request]
        count = query_start_loc[request + 1] - start
        seq_lens[request] = first + count
        for i in range(count):
            pos[start + i] = first + i


@replaces_kernel("gpu.input_batch._combine_sampled_and_draft_tokens_kernel", compiled=True)
def combine_drafts(
    input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, prefill_len,
    draft_tokens, cu_num_logits, logits_indices, NUM_NEW_SAMPLED_TOKENS,
):  # fmt: skip
    for request in range(len(idx_mapping)):
        at, first = idx_mapping[request], cu_num_logits[request]
        count, end = cu_num_logits[request + 1] - first, query_start_loc[request + 1]
        num_drafts = count - NUM_NEW_SAMPLED_TOKENS
        for i in range(count):
            logits_indices[first + i] = end - count + i
        length, prefill = seq_lens[request], prefill_len[at]
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS and length - count >= prefill:
            input_ids[end - count] = last_sampled_tokens[at, 0]
        input_ids[end - num_drafts : end] = draft_tokens[at, :num_drafts]


@replaces_kernel("gpu.input_batch._get_num_sampled_and_rejected_kernel", compiled=True)
def sampled_and_rejected(
    num_sampled, num_rejected, seq_lens, cu_num_logits, idx_mapping, prefill_len
):
    for request in range(len(num_sampled)):
        if seq_lens[request] < prefill_len[idx_mapping[request]]:
            num_sampled[request] = num_rejected[request] = 0
        else:
            rows = cu_num_logits[request + 1] - cu_num_logits[request]
            num_rejected[request] = rows - num_sampled[request]


@replaces_kernel("gpu.input_batch._post_update_kernel", compiled=True)
def post_update(
    idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts, sampled_tokens,
    num_sampled, num_rejected, query_start_loc, all_token_ids, total_len,
):  # fmt: skip
    """Counts and rows may be None: nothing was computed."""
    for request in range(len(idx_mapping)):
        at, count = idx_mapping[request], num_sampled[request]
        if at < 0:
            continue
        if count > 0:
            length = total_len[at]
            for i in range(count):
                token = sampled_tokens[request, i]
                if length + i < all_token_ids.shape[1]:
                    all_token_ids[at, length + i] = token
                if output_bin_counts is not None:
                    output_bin_counts[at, token] += 1
            last_sampled_tokens[at, 0] = sampled_tokens[request, count - 1]
            total_len[at] = length + count
        if query_start_loc is not None:
            num_computed_tokens[at] += query_start_loc[request + 1] - query_start_loc[request]
        num_computed_tokens[at] -= num_rejected[request]


@replaces_kernel("gpu.input_batch._expand_idx_mapping_kernel", compiled=True)
def expand_slots(idx_mapping, expanded_idx_mapping, expanded_local_pos, cu_num_logits):
    for request in range(len(idx_mapping)):
        first = cu_num_logits[request]
        for i in range(cu_num_logits[request + 1] - first):
            expanded_idx_mapping[first + i] = idx_mapping[request]
            expanded_local_pos[first + i] = i


@replaces_kernel("gpu.buffer_utils._apply_write_kernel")
def apply_write(output, write_indices, write_starts, write_contents, write_cu_lens, MULTI_GROUP):
    if MULTI_GROUP:
        raise NotImplementedError("Writes of several groups go tensor by tensor on a CPU.")
    flat, begin = output.view(len(output), -1), 0
    writes = zip(write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist())
    for row, start, end in writes:
        flat[row, start : start + end - begin] = write_contents[begin:end]
        begin = end


@replaces_kernel("utils._zero_kv_blocks_kernel")
def zero_blocks(seg_addrs, seg_block_strides, seg_page_sizes, block_ids):
    segments = zip(seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist())
    for (address, stride, size), block in product(segments, block_ids.tolist()):
        memset(address + 4 * stride * block, 0, 4 * size)
