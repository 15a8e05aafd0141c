"""Top-k tokens and rank features from draft logits, for CPUs: one pass over each row.

Differs from `lm_and_rank_head` in torch in the last digits only. Ties go to the lower index.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..optional_numba import njit
from .lm_and_rank_head import FEATURE_LOGPROBS, DraftLogits

_CHUNK = 1024
_F = np.float32
_FAST = {"nnan", "nsz", "contract", "reassoc"}


def lm_and_rank_head_numba(
    given: DraftLogits,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run both heads; see `lm_and_rank_head`."""
    normed, logits, offset, rank_head, width, scope, beta = given
    shape, vocab_size = logits.shape[:-1], logits.shape[-1]
    scores = logits.reshape(-1, vocab_size)
    if scores.dtype == torch.bfloat16:
        scores = scores.view(torch.int16)
    elif scores.dtype != torch.float32:
        scores = scores.float()
    rows = len(scores)
    reach = min(max(scope or FEATURE_LOGPROBS, width), vocab_size)
    logprob, token = torch.empty(rows, width), torch.empty(rows, width, dtype=torch.int64)
    features = torch.empty(rows, FEATURE_LOGPROBS + 5)
    each = rows // max(1, logits.shape[0])
    factor = torch.ones(logits.shape[0]) if beta is None else beta
    read = (x.contiguous().numpy() for x in (scores, offset, factor))
    made = (x.numpy() for x in (logprob, token, features))
    _read(*read, max(1, each), reach, scope or 0, *made)
    features = features.view(*shape, -1).to(normed.dtype)
    rank_logits = rank_head(torch.cat([normed, features], dim=-1))
    return logprob.view(*shape, width), token.view(*shape, width), rank_logits.argmax(-1)


@njit(fastmath=_FAST)
def load_scores(logits, start, count, scores):
    """Write logits as fp32 to `scores`; bfloat16 is passed as int16."""
    part = logits[start : start + count]  # a sum may be negative, so it would compile to a gather
    if logits.itemsize == 2:
        bits = scores.view(np.int32)
        for i in range(count):
            bits[i] = np.int32(part[i]) << np.int32(16)
    else:
        for i in range(count):
            scores[i] = part[i]


@njit(fastmath=_FAST)
def _exponentials(scores, count, factor, top, out):
    """exp(factor · (score − top)) of numbers not above top, with 2^n by shifting.

    2^f on [0, 1) is a polynomial, off by 2e-7 at most.
    """
    bits = out.view(np.int32)
    for i in range(count):
        power = max((scores[i] - top) * factor * _F(1.4426950408889634), _F(-126))
        whole = _F(math.floor(power))
        f = power - whole
        value = _F(1.8775767e-3)
        value = value * f + _F(8.9893397e-3)
        value = value * f + _F(5.5826318e-2)
        value = value * f + _F(2.4015361e-1)
        value = value * f + _F(6.9315308e-1)
        out[i] = value * f + _F(9.9999994e-1)
        bits[i] += np.int32(whole) << np.int32(23)


@njit(fastmath=_FAST)
def _sums(scores, power, count, top):
    """Return Σ e^x and Σ x e^x, given e^x as `power`."""
    total, weighed = _F(0), _F(0)
    for i in range(count):
        total += power[i]
        weighed += power[i] * max(scores[i] - top, _F(-1e30))
    return total, weighed


@njit
def _read(
    rows,  # [rows, Vd] fp32, or int16 for bfloat16
    offset,  # [Vd] int64
    beta,  # [R] fp32
    each,  # rows of a request
    reach,  # of the best logits are wanted
    scope,  # 0: the features are of all logits
    logprob,  # [rows, B] fp32
    token,  # [rows, B] int64
    features,  # [rows, 15] fp32
):
    size, width = rows.shape[1], logprob.shape[1]
    scores, power = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    best, index = np.empty(reach, np.float32), np.empty(reach, np.int64)
    for row in range(rows.shape[0]):
        best[:], index[:] = -np.inf, 0
        for start in range(0, size, _CHUNK):
            count = min(_CHUNK, size - start)
            load_scores(rows[row], start, count, scores)
            above, floor = np.int32(0), best[reach - 1]
            for i in range(count):
                above += np.int32(scores[i] > floor)
            if above == 0:
                continue
            for i in range(count):
                now = scores[i]
                if now > best[reach - 1]:
                    b = reach - 1
                    while b > 0 and best[b - 1] < now:
                        best[b], index[b] = best[b - 1], index[b - 1]
                        b -= 1
                    best[b], index[b] = now, start + i
        top, factor = best[0], beta[row // each]
        total, weighed, sharp = 0.0, 0.0, 0.0
        for start in range(0, size, _CHUNK):
            count = min(_CHUNK, size - start)
            load_scores(rows[row], start, count, scores)
            if scope == 0 or factor == 1:
                _exponentials(scores, count, _F(1), top, power)
                part, heavy = _sums(scores, power, count, top)
                total += part
                weighed += heavy
            if factor != 1:
                _exponentials(scores, count, factor, top, power)
                sharp += _sums(scores, power, count, top)[0]
        if factor == 1:
            sharp = total
        if scope > 0:
            total = weighed = 0.0
            for i in range(min(scope, reach)):
                mass = math.exp(best[i] - top)
                total += mass
                weighed += mass * (best[i] - top)
        norm, log_sharp = math.log(total), math.log(sharp)
        for b in range(width):
            logprob[row, b] = factor * (best[b] - top) - log_sharp
            token[row, b] = index[b] + offset[index[b]]
        for i in range(10):
            features[row, i] = best[i] - top - norm
        features[row, 10], features[row, 11] = top - best[1], top - best[2]
        features[row, 12], features[row, 13] = top - best[4], math.exp(-norm)
        features[row, 14] = norm - weighed / total
