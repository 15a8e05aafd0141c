"""Replacements of vLLM's logits processing in torch; see `kernels.py`."""

from __future__ import annotations

import itertools

import torch

from vllm_specblock.cpu.kernels import replaces_kernel


@replaces_kernel("gpu.sample.gumbel._temperature_kernel")
def temperature(logits, expanded_idx_mapping, temperature):
    row_temperature = temperature[expanded_idx_mapping]
    logits /= torch.where(row_temperature == 0, 1.0, row_temperature)[:, None]


@replaces_kernel("gpu.sample.min_p._min_p_kernel")
def min_p(logits, expanded_idx_mapping, min_p):
    # log(0) = −inf keeps everything, as a request without min_p wants.
    floor = logits.max(dim=1).values + min_p[expanded_idx_mapping].log()
    logits.masked_fill_(logits < floor[:, None], float("-inf"))


@replaces_kernel("gpu.sample.penalties._penalties_kernel")
def penalties(
    logits, expanded_idx_mapping, token_ids, expanded_local_pos, repetition_penalty,
    frequency_penalty, presence_penalty, prompt_bin_mask, output_bin_counts, vocab_size,
):  # fmt: skip
    bits = torch.arange(32, dtype=torch.int32)
    given = repetition_penalty, frequency_penalty, presence_penalty
    for row, at, place in _rows(expanded_idx_mapping, expanded_local_pos):
        repetition, frequency, presence = (penalty[at] for penalty in given)
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        counts = output_bin_counts[at, :vocab_size].clone()
        for earlier in token_ids[row - place + 1 : row + 1].tolist():
            if earlier >= 0:
                counts[earlier] += 1
        scores, used = logits[row, :vocab_size], counts > 0
        if repetition != 1:
            prompt = ((prompt_bin_mask[at, :, None] >> bits) & 1).flatten()[:vocab_size].bool()
            factor = torch.where(prompt | used, repetition, 1.0)
            scores *= torch.where(scores > 0, 1 / factor, factor)
        scores -= frequency * counts
        scores -= presence * used


@replaces_kernel("gpu.sample.logit_bias._bias_kernel")
def logit_bias(
    logits, vocab_size, expanded_idx_mapping, num_allowed_token_ids, allowed_token_ids,
    num_logit_bias, bias_token_ids, bias, pos, min_lens, num_stop_token_ids,
    restore_when_all_masked, stop_token_ids, CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    for row, at, place in _rows(expanded_idx_mapping, pos):
        scores = logits[row, :vocab_size]
        if count := int(num_allowed_token_ids[at]):
            kept = allowed_token_ids[at, :count].long()
            scores.copy_(torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept]))
        if count := int(num_logit_bias[at]):
            scores.index_add_(0, bias_token_ids[at, :count].long(), bias[at, :count])
        if (count := int(num_stop_token_ids[at])) and place + 1 < int(min_lens[at]):
            ends = stop_token_ids[at, :count].long()
            before = scores[ends]
            scores[ends] = float("-inf")
            restores = CHECK_ALL_MASKED_ROWS and restore_when_all_masked[at]
            if restores and scores.max() == float("-inf"):
                scores[ends] = torch.where(before.isfinite(), before, scores[ends])


@replaces_kernel("gpu.sample.bad_words._bad_words_kernel")
def bad_words(
    logits, expanded_idx_mapping, bad_word_token_ids, bad_word_offsets, num_bad_words,
    all_token_ids, prompt_len, total_len, input_ids, expanded_local_pos,
):  # fmt: skip
    for row, at, place in _rows(expanded_idx_mapping, expanded_local_pos):
        count = int(num_bad_words[at])
        if not count:
            continue
        so_far = all_token_ids[at, int(prompt_len[at]) : int(total_len[at])].tolist()
        so_far += input_ids[row - place + 1 : row + 1].tolist()
        for start, end in itertools.pairwise(bad_word_offsets[at, : count + 1].tolist()):
            *prefix, last = bad_word_token_ids[at, start:end].tolist()
            if not prefix or so_far[-len(prefix) :] == prefix:
                logits[row, last] = float("-inf")


@replaces_kernel("gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
def find_markers(
    req_ids, thinking_token_budget, all_token_ids, total_len, cached_last_start, cached_last_end,
    cached_scan_pos, reasoning_start_token_ids, natural_reasoning_end_token_ids, MAX_LEN,
):  # fmt: skip
    """Find the last markers; the kernel may miss the earlier one, since only their order counts."""
    starts, ends = reasoning_start_token_ids.tolist(), natural_reasoning_end_token_ids.tolist()
    for at in req_ids.tolist():
        if thinking_token_budget[at] < 0:
            continue
        length, scanned = int(total_len[at]), int(cached_scan_pos[at])
        if scanned > length:
            scanned, cached_last_start[at], cached_last_end[at] = 0, -1, -1
        text = all_token_ids[at, scanned:length].tolist()
        for last, marker in ((cached_last_start, starts), (cached_last_end, ends)):
            found = _last(marker, text)
            if found >= 0:
                last[at] = scanned + found
        cached_scan_pos[at] = max(0, length - (MAX_LEN - 1))


@replaces_kernel("gpu.sample.thinking_budget._thinking_budget_kernel")
def thinking_budget(
    logits, expanded_idx_mapping, thinking_token_budget, all_token_ids, total_len, input_ids,
    expanded_local_pos, cached_last_start, cached_last_end, reasoning_start_token_ids,
    natural_reasoning_end_token_ids, reasoning_end_token_ids,
):  # fmt: skip
    start, end = reasoning_start_token_ids.tolist(), natural_reasoning_end_token_ids.tolist()
    forced = reasoning_end_token_ids.tolist()
    reach = max(len(start), len(end), len(forced)) - 1
    for row, at, place in _rows(expanded_idx_mapping, expanded_local_pos):
        most = int(thinking_token_budget[at])
        if most < 0:
            continue
        length = int(total_len[at])
        first = max(0, length - reach)
        text = all_token_ids[at, first:length].tolist()
        text += input_ids[row - place + 1 : row + 1].tolist()
        begun, ended = int(cached_last_start[at]), int(cached_last_end[at])
        if (found := _last(start, text)) >= 0:
            begun = max(begun, first + found)
        if (found := _last(end, text)) >= 0:
            ended = max(ended, first + found)
        thought = length + place - (begun + len(start))
        if begun < 0 or begun <= ended or thought < most:
            continue
        counts = range(min(len(forced) - 1, len(text)), 0, -1)
        said = next((n for n in counts if text[-n:] == forced[:n]), 0)
        logits[row, forced[said]] = 1e9


@replaces_kernel("gpu.structured_outputs._apply_grammar_bitmask_kernel")
def grammar_bitmask(logits, logits_indices, cu_num_logits, bitmask, vocab_size, MASK_STRIDE):
    bits, bounds = torch.arange(32, dtype=torch.int32), cu_num_logits.tolist()
    for allowed, where in zip(bitmask, logits_indices.tolist()):
        request, place = divmod(where, MASK_STRIDE)
        if place < bounds[request + 1] - bounds[request]:
            refused = (((allowed[:, None] >> bits) & 1) == 0).flatten()[:vocab_size]
            logits[bounds[request] + place, :vocab_size].masked_fill_(refused, float("-inf"))


@replaces_kernel("gpu.sample.logprob._topk_log_softmax_kernel")
def token_logprobs(output, logits, topk_ids):
    scores = logits.float()
    output.copy_(scores.gather(1, topk_ids) - scores.logsumexp(dim=1, keepdim=True))


@replaces_kernel("gpu.sample.logprob._ranks_kernel")
def ranks(output, logits, token_ids):
    output.copy_((logits >= logits.gather(1, token_ids.view(-1, 1))).sum(dim=1))


def _rows(req_idx, place):
    """Yield each row, its request slot and its number in the request."""
    for row, (at, local) in enumerate(zip(req_idx.tolist(), place.tolist())):
        yield row, at, local


def _last(marker, text):
    """Return the last start of `marker` in `text`; −1: none."""
    count = len(marker)
    places = range(len(text) - count, -1, -1)
    return next((at for at in places if text[at : at + count] == marker), -1)
