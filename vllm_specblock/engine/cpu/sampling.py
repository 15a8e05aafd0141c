"""What vLLM does to logits and draws from them, in torch, for CPUs; `kernels.py` says for whom."""

from __future__ import annotations

import itertools

import torch


def temperature(logits, _0, req_idx, temperature, vocab_size, BLOCK_SIZE):
    row_temperature = temperature[req_idx]
    logits /= torch.where(row_temperature == 0, 1.0, row_temperature)[:, None]


def min_p(logits, _0, req_idx, min_p, vocab_size, BLOCK_SIZE):
    # log(0) = −inf keeps everything, as a request without min_p wants.
    floor = logits.max(dim=1).values + min_p[req_idx].log()
    logits.masked_fill_(logits < floor[:, None], float("-inf"))


def penalties(
    logits, _0, req_idx, token, node, repetition, frequency, presence, prompt_mask, _1,
    output_counts, _2, vocab_size, BLOCK_SIZE,
):  # fmt: skip
    bits = torch.arange(32, dtype=torch.int32)
    for row, (at, place) in enumerate(zip(req_idx.tolist(), node.tolist())):
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
    logits, _0, vocab_size, req_idx, num_allowed, allowed, _1, num_biased, biased, _2, bias, _3,
    position, min_len, num_stops, restore, stops, _4, BLOCK_SIZE, LOGITS_BLOCK_SIZE,
    CHECK_ALL_MASKED_ROWS,
):  # fmt: skip
    for row, (at, place) in enumerate(zip(req_idx.tolist(), position.tolist())):
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
    logits, _0, req_idx, words, _1, offsets, _2, num_words, all_token_ids, _3, prompt_len,
    total_len, token, node,
):  # fmt: skip
    for row, (at, place) in enumerate(zip(req_idx.tolist(), node.tolist())):
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
