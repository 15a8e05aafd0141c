"""N-gram drafter for CPUs: occurrences and continuations in one call.

The reference of the kernels in `occurrences.py` and `continuations.py`. Logarithms and powers may
differ in their last digits, so scores may differ by one step.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..optional_numba import njit
from ..tree.candidate_keys import CLOSED, DEPTH_ONE
from ..tree.select_tree import Candidates, TreeTensors
from ..tree.select_tree_numba import select_numba
from .occurrences import Following, Texts


def follow_numba(texts: Texts, how: Following) -> TreeTensors:
    """Return the trees of R texts; see `NGramDrafter`."""
    shape = len(texts.row), how.candidates
    token, parent, key = torch.zeros(3, *shape, dtype=torch.int64)
    score = torch.empty(shape)
    places = (x.contiguous().numpy() for x in texts[1:])
    made = (x.numpy() for x in (token, parent, score, key))
    _follow(texts.table.numpy(), *places, how, *made)
    return select_numba(Candidates(token, parent, score, key, None), how.budget)


_AT_ONCE = 128  # places


@njit
def _occurs(said, token):
    """Return whether a token occurs; counting vectorises."""
    count = np.int32(0)
    for j in range(len(said)):
        count += np.int32(said[j] == token)
    return count > 0


@njit
def _search(said, first, text, places, min_match, max_match, best):
    """Put the places in `said`, which begins at `first`, among the `best` [B], in their order."""
    newest, end, branches = text[-1], len(text) - 1, len(best)
    for start in range(0, len(said), _AT_ONCE):
        if not _occurs(said[start : start + _AT_ONCE], newest):
            continue
        for j in range(start, min(start + _AT_ONCE, len(said))):
            if said[j] != newest:
                continue
            count, most = 1, min(max_match, j + 1, end + 1)
            while count < most and said[j - count] == text[end - count]:
                count += 1
            if count < min_match:
                continue
            now = first + j + count * places
            b = branches
            while b > 0 and best[b - 1] < now:
                b -= 1
            for later in range(branches - 1, b, -1):
                best[later] = best[later - 1]
            if b < branches:
                best[b] = now


@njit
def _follow(
    table,  # [S, width] int32
    row,  # [R] int64
    position,  # [T] int64
    last,  # [R] int64
    earlier,  # [E] int32
    how,  # Following
    token,  # [R, 1 + B·D] int64, the root first, as the others
    parent,
    score,  # fp32
    key,
):
    min_match, max_match, branches, depth, _, vote, power, votes, nats = how
    begin = len(earlier)  # the place of a text's first token
    width, places = table.shape[1], begin + table.shape[1]
    best, found = np.empty(branches, np.int64), np.empty((branches, depth), np.int64)
    matched, ends = np.empty(branches, np.int64), np.empty(branches, np.int64)
    cast, shared = np.empty((branches, depth)), np.empty((branches, branches), np.int64)
    for r in range(len(row)):
        text = table[row[r]]
        newest = min(max(last[r], 0), len(position) - 1)
        length = min(max(position[newest] + 2, 0), width)
        best[:] = -1
        if length:
            ending = text[:length]
            _search(earlier, 0, ending, places, min_match, max_match, best)
            _search(ending[:-1], begin, ending, places, min_match, max_match, best)

        for b in range(branches):
            matched[b] = 0
            if best[b] < 0:
                continue
            place, matched[b] = best[b] % places, best[b] // places
            period = max(begin + length - 1 - place, 1)
            ends[b] = depth
            for k in range(depth):
                if place >= begin:
                    found[b, k] = text[min(place - begin + 1 + k % period, width - 1)]
                else:
                    found[b, k] = earlier[place + 1 + k] if place + 1 + k < begin else -1
                    if found[b, k] < 0:
                        ends[b] = min(ends[b], k)
                weight = votes * vote * (matched[b] + k) ** power / (b + 1) ** 0.25
                cast[b, k] = np.rint(weight)
        score[r, 0] = 0
        for b in range(branches):
            parts, leader = 0, 0
            for other in range(branches):
                if matched[b] == 0 or matched[other] == 0:
                    continue
                alike = 0
                while alike < depth and found[b, alike] == found[other, alike]:
                    alike += 1
                shared[b, other] = alike
                if other < b and alike > parts:
                    parts, leader = alike, other
            total = 0.0
            for k in range(depth):
                c = 1 + b * depth + k
                if matched[b] == 0 or k >= ends[b]:
                    score[r, c], key[r, c] = -np.inf, CLOSED
                    continue
                heard, agree = 0.0, 0.0
                for other in range(branches):
                    if matched[other] and shared[b, other] >= k and k < ends[other]:
                        heard += cast[other, k]
                        if shared[b, other] > k:
                            agree += cast[other, k]
                gain = math.log(agree / heard * agree / (agree + votes))
                total += min(np.rint(gain * nats), 0.0)
                token[r, c] = found[b, k]
                parent[r, c] = 0 if k == 0 else (leader if k == parts else b) * depth + k
                score[r, c] = np.float32(total / nats) if k >= parts else -np.inf
                key[r, c] = (k + 1) * DEPTH_ONE + c
    bits = score.view(np.int32)
    for r in range(len(row)):
        for c in range(1, score.shape[1]):
            if key[r, c] < CLOSED:
                # Absolute value: a score is at most 0.
                key[r, c] += np.int64(bits[r, c] & 0x7FFFFFFF) << 32
