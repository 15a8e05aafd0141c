"""Torch functions for the kernels of Model Runner V2 that a decode step launches, for CPUs.

Triton's interpreter runs those kernels as they are, at 10 to 100 times the cost of a whole
step of a small model. vLLM has a hook to replace single kernels on other platforms
(`vllm.triton_utils.dispatcher`); this is what is put there. Each function takes its kernel's
arguments in the kernel's order, and writes what the kernel writes. Runs with and without
SpecBlock use the same ones, so neither comparison nor exactness depends on them.

Reading values with `.tolist()` is free here: every tensor of this file is in host memory.
"""

from __future__ import annotations

import itertools

import torch


def _signed(word: int) -> int:
    """A 32-bit word as the int32 that holds it."""
    return word - (1 << 32) if word >> 31 else word


_C1, _C2, _C3 = _signed(0xCC9E2D51), 0x1B873593, _signed(0xE6546B64)
_F1, _F2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_DRAFT_SALT = 1 << 30


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int32 would drag its sign along."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value << bits) | _shift_right(value, 32 - bits)


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One murmur3 round in wrapping int32 arithmetic."""
    return _rotate(state ^ (_rotate(key * _C1, 15) * _C2), 13) * 5 + _C3


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """vLLM's fp32 noise of every token for each (seed, position).

    Args:
        seed, position: [n] int64.

    Returns:
        [n, vocab_size] fp32.
    """
    state = torch.zeros_like(seed, dtype=torch.int32)
    for word in (seed, seed >> 32, position):
        state = _mix(state, word.to(torch.int32))
    bits = _mix(state[:, None], torch.arange(vocab_size, dtype=torch.int32)) ^ 16
    bits = (bits ^ _shift_right(bits, 16)) * _F1
    bits = (bits ^ _shift_right(bits, 13)) * _F2
    bits = bits ^ _shift_right(bits, 16)
    low = (bits & 0xFFFF).float()
    uniform = _shift_right(bits, 16).float() * 2.0**-16 + (low + 0.5) * 2.0**-32
    series = torch.full_like(uniform, 1 / 8)
    for order in (7, 6, 5, 4, 3, 2, 1):
        series = 1 / order + uniform * series
    direct = torch.log((1 - uniform).clamp(min=2.0**-24))
    return -torch.log(-torch.where(uniform < 0.25, -uniform * series, direct))


def gumbel_sample(
    local_argmax, _0, local_max, _1, logits_cache, _2, _3, _4, _5, _6, logits, _7, slot, seeds,
    position, temperature, vocab_size, BLOCK_SIZE, IS_DRAFTING, APPLY_TEMPERATURE, USE_FP64,
    PER_TOKEN_COL,
):  # fmt: skip
    if logits_cache is not None or USE_FP64:
        raise NotImplementedError("Cached draft logits and fp64 noise are not there on a CPU.")
    scores = logits[:, :vocab_size].float()
    heat = temperature[slot]
    hot = (heat != 0).nonzero().flatten()
    if len(hot):
        warm = scores[hot]
        if APPLY_TEMPERATURE:
            warm = warm / heat[hot, None]
        at = position[hot].long() + (_DRAFT_SALT if IS_DRAFTING else 0)
        warm = warm + gumbel_noise(seeds[slot[hot]].long(), at, vocab_size)
        scores = warm if len(hot) == len(scores) else scores.index_copy(0, hot, warm)
    for block, part in enumerate(scores.split(BLOCK_SIZE, dim=1)):
        local_max[:, block], index = part.max(dim=1)
        local_argmax[:, block] = index + block * BLOCK_SIZE


def temperature(logits, _0, slot, temperature, vocab_size, BLOCK_SIZE):
    heat = temperature[slot]
    logits /= torch.where(heat == 0, 1.0, heat)[:, None]


def min_p(logits, _0, slot, min_p, vocab_size, BLOCK_SIZE):
    # log(0) = −inf keeps everything, as a request without min_p wants.
    floor = logits.max(dim=1).values + min_p[slot].log()
    logits.masked_fill_(logits < floor[:, None], float("-inf"))


def penalties(
    logits, _0, slot, token, node, repetition, frequency, presence, prompt_mask, _1,
    output_counts, _2, vocab_size, BLOCK_SIZE,
):  # fmt: skip
    bits = torch.arange(32, dtype=torch.int32)
    for row, (at, place) in enumerate(zip(slot.tolist(), node.tolist())):
        scale, per_use, once = (float(p[at]) for p in (repetition, frequency, presence))
        if scale == 1 and per_use == 0 and once == 0:
            continue
        counts = output_counts[at, :vocab_size].clone()
        for earlier in token[row - place + 1 : row + 1].tolist():
            if earlier >= 0:
                counts[earlier] += 1
        scores, used = logits[row, :vocab_size], counts > 0
        if scale != 1:
            prompt = ((prompt_mask[at, :, None] >> bits) & 1).flatten()[:vocab_size].bool()
            factor = torch.where(prompt | used, repetition[at], 1.0)
            scores *= torch.where(scores > 0, 1 / factor, factor)
        scores -= frequency[at] * counts
        scores -= presence[at] * used


def logit_bias(
    logits, _0, vocab_size, slot, num_allowed, allowed, _1, num_biased, biased, _2, bias, _3,
    position, min_len, num_stops, restore, stops, _4, BLOCK_SIZE, LOGITS_BLOCK_SIZE,
    CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    for row, (at, place) in enumerate(zip(slot.tolist(), position.tolist())):
        scores = logits[row, :vocab_size]
        if count := int(num_allowed[at]):
            kept = allowed[at, :count].long()
            scores.copy_(torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept]))
        if count := int(num_biased[at]):
            scores.index_add_(0, biased[at, :count].long(), bias[at, :count])
        if (count := int(num_stops[at])) and place + 1 < int(min_len[at]):
            ends = stops[at, :count].long()
            before = scores[ends]
            scores[ends] = float("-inf")
            if CHECK_ALL_MASKED_ROWS and restore[at] and scores.max() == float("-inf"):
                scores[ends] = torch.where(before.isfinite(), before, scores[ends])


def bad_words(
    logits, _0, slot, words, _1, offsets, _2, num_words, all_token_ids, _3, prompt_len,
    total_len, token, node,
):  # fmt: skip
    for row, (at, place) in enumerate(zip(slot.tolist(), node.tolist())):
        count = int(num_words[at])
        if not count:
            continue
        so_far = all_token_ids[at, int(prompt_len[at]) : int(total_len[at])].tolist()
        so_far += token[row - place + 1 : row + 1].tolist()
        bounds = offsets[at, : count + 1].tolist()
        for start, end in itertools.pairwise(bounds):
            *prefix, last = words[at, start:end].tolist()
            if not prefix or so_far[-len(prefix) :] == prefix:
                logits[row, last] = float("-inf")


def grammar_bitmask(logits, _0, index, first_row, bitmask, _1, vocab_size, MASK_STRIDE, BLOCK_SIZE):
    bits = torch.arange(32, dtype=torch.int32)
    bounds = first_row.tolist()
    for allowed, where in zip(bitmask, index.tolist()):
        request, place = divmod(where, MASK_STRIDE)
        if place < bounds[request + 1] - bounds[request]:
            refused = (((allowed[:, None] >> bits) & 1) == 0).flatten()[:vocab_size]
            logits[bounds[request] + place, :vocab_size].masked_fill_(refused, float("-inf"))


def token_logprobs(
    output, logits, _0, token_ids, _1, count, vocab_size, BLOCK_SIZE, TOPK_BLOCK_SIZE
):
    scores = logits.float()
    output.copy_(scores.gather(1, token_ids) - scores.logsumexp(dim=1, keepdim=True))


def ranks(output, logits, _0, token_ids, vocab_size, BLOCK_SIZE):
    chosen = logits.gather(1, token_ids.view(-1, 1))
    output.copy_((logits >= chosen).sum(dim=1))


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


_AT = "vllm.v1.worker.gpu."

KERNELS = {
    _AT + "sample.gumbel._gumbel_sample_kernel": gumbel_sample,
    _AT + "sample.gumbel._temperature_kernel": temperature,
    _AT + "sample.min_p._min_p_kernel": min_p,
    _AT + "sample.penalties._penalties_kernel": penalties,
    _AT + "sample.logit_bias._bias_kernel": logit_bias,
    _AT + "sample.bad_words._bad_words_kernel": bad_words,
    _AT + "sample.logprob._topk_log_softmax_kernel": token_logprobs,
    _AT + "sample.logprob._ranks_kernel": ranks,
    _AT + "structured_outputs._apply_grammar_bitmask_kernel": grammar_bitmask,
    _AT + "spec_decode.rejection_sampler._flatten_sampled_kernel": flatten_sampled,
    _AT + "spec_decode.rejection_sampler._gather_draft_sampled_kernel": gather_drafts,
    _AT + "input_batch._prepare_prefill_inputs_kernel": prefill_inputs,
    _AT + "input_batch._prepare_pos_seq_lens_kernel": positions_and_lengths,
    _AT + "input_batch._combine_sampled_and_draft_tokens_kernel": combine_drafts,
    _AT + "input_batch._get_num_sampled_and_rejected_kernel": sampled_and_rejected,
    _AT + "input_batch._post_update_kernel": post_update,
    _AT + "input_batch._expand_idx_mapping_kernel": expand_slots,
    _AT + "buffer_utils._apply_write_kernel": apply_write,
}
"""Kernel of Model Runner V2 → what runs in its place."""
