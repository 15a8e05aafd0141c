"""What vLLM does to logits and draws from them, in torch, for CPUs; `kernels.py` says for whom."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def temperature(
    logits: Tensor, _0: int, req_idx: Tensor, temperature: Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    row_temperature = temperature[req_idx]
    logits /= torch.where(row_temperature == 0, 1.0, row_temperature)[:, None]


def min_p(
    logits: Tensor, _0: int, req_idx: Tensor, min_p: Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    # log(0) = −inf keeps everything, as a request without min_p wants.
    floor = logits.max(dim=1).values + min_p[req_idx].log()
    logits.masked_fill_(logits < floor[:, None], float("-inf"))


def penalties(
    logits: Tensor,
    _0: int,
    req_idx: Tensor,
    token: Tensor,
    node: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    prompt_mask: Tensor,
    _1: int,
    output_counts: Tensor,
    _2: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
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
    logits: Tensor,
    _0: int,
    vocab_size: int,
    req_idx: Tensor,
    num_allowed: Tensor,
    allowed: Tensor,
    _1: int,
    num_biased: Tensor,
    biased: Tensor,
    _2: int,
    bias: Tensor,
    _3: int,
    position: Tensor,
    min_len: Tensor,
    num_stops: Tensor,
    restore: Tensor,
    stops: Tensor,
    _4: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
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
    logits: Tensor,
    _0: int,
    req_idx: Tensor,
    words: Tensor,
    _1: int,
    offsets: Tensor,
    _2: int,
    num_words: Tensor,
    all_token_ids: Tensor,
    _3: int,
    prompt_len: Tensor,
    total_len: Tensor,
    token: Tensor,
    node: Tensor,
) -> None:
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


def find_markers(
    req_idx: Tensor,
    budget: Tensor,
    all_token_ids: Tensor,
    _0: int,
    total_len: Tensor,
    last_start: Tensor,
    last_end: Tensor,
    scan_pos: Tensor,
    start_marker: Tensor,
    end_marker: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Find the last markers. The kernel may miss the earlier of the two: only the order counts."""
    start, end = start_marker.tolist(), end_marker.tolist()
    for at in req_idx.tolist():
        if budget[at] < 0:
            continue
        length, scanned = int(total_len[at]), int(scan_pos[at])
        if scanned > length:
            scanned, last_start[at], last_end[at] = 0, -1, -1
        text = all_token_ids[at, scanned:length].tolist()
        for last, marker in ((last_start, start), (last_end, end)):
            found = _last(marker, text)
            if found >= 0:
                last[at] = scanned + found
        scan_pos[at] = max(0, length - (MAX_LEN - 1))


def thinking_budget(
    logits: Tensor,
    _0: int,
    req_idx: Tensor,
    budget: Tensor,
    all_token_ids: Tensor,
    _1: int,
    total_len: Tensor,
    token: Tensor,
    node: Tensor,
    last_start: Tensor,
    last_end: Tensor,
    start_marker: Tensor,
    natural_end_marker: Tensor,
    end_marker: Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    start, end = start_marker.tolist(), natural_end_marker.tolist()
    forced = end_marker.tolist()
    reach = max(START_LEN, NATURAL_END_LEN, END_LEN) - 1
    for row, (at, place) in enumerate(zip(req_idx.tolist(), node.tolist())):
        most = int(budget[at])
        if most < 0:
            continue
        length = int(total_len[at])
        first = max(0, length - reach)
        text = all_token_ids[at, first:length].tolist()
        text += token[row - place + 1 : row + 1].tolist()
        begun, ended = int(last_start[at]), int(last_end[at])
        if (found := _last(start, text)) >= 0:
            begun = max(begun, first + found)
        if (found := _last(end, text)) >= 0:
            ended = max(ended, first + found)
        thought = length + place - (begun + START_LEN)
        if begun < 0 or begun <= ended or thought < most:
            continue
        counts = range(min(END_LEN - 1, len(text)), 0, -1)
        said = next((n for n in counts if text[-n:] == forced[:n]), 0)
        logits[row, forced[said]] = 1e9


def _last(marker: list[int], text: list[int]) -> int:
    """Return the last start of `marker` in `text`; −1: none."""
    count = len(marker)
    places = range(len(text) - count, -1, -1)
    return next((at for at in places if text[at : at + count] == marker), -1)


def grammar_bitmask(
    logits: Tensor,
    _0: int,
    index: Tensor,
    first_row: Tensor,
    bitmask: Tensor,
    _1: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    bits = torch.arange(32, dtype=torch.int32)
    bounds = first_row.tolist()
    for allowed, where in zip(bitmask, index.tolist()):
        request, place = divmod(where, MASK_STRIDE)
        if place < bounds[request + 1] - bounds[request]:
            refused = (((allowed[:, None] >> bits) & 1) == 0).flatten()[:vocab_size]
            logits[bounds[request] + place, :vocab_size].masked_fill_(refused, float("-inf"))


def token_logprobs(
    output: Tensor,
    logits: Tensor,
    _0: int,
    token_ids: Tensor,
    _1: int,
    count: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    scores = logits.float()
    output.copy_(scores.gather(1, token_ids) - scores.logsumexp(dim=1, keepdim=True))


def ranks(
    output: Tensor, logits: Tensor, _0: int, token_ids: Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    chosen = logits.gather(1, token_ids.view(-1, 1))
    output.copy_((logits >= chosen).sum(dim=1))
