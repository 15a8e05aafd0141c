"""Tree of what followed earlier occurrences of a text's end: the n-gram drafter's second launch.

The reference is `continuations_numba.py`, up to the last digits of logarithms and powers.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, strides_of, tl
from ..tree.candidate_keys import DEPTH_ONE
from ..tree.select_tree import SelectConstants, TreeTensors, select_part, warps_for
from .occurrences import Following, Texts, length_of, occurrences_triton, stretch_of


def follow_triton(texts: Texts, how: Following) -> TreeTensors:
    """Return the trees of R texts, in two launches; see `NGramDrafter`."""
    count, candidates, device = len(texts.row), how.candidates, texts.table.device
    fields = torch.empty(4, count, candidates, dtype=torch.int64, device=device)
    score = torch.empty(count, candidates, device=device)
    tree = TreeTensors.empty(count, how.budget, fields[3])
    found = occurrences_triton(texts, how)
    _follow_kernel[(count,)](
        *texts,
        strides_of(texts),
        texts.width,
        len(texts.earlier),
        found,
        fields,
        score,
        tree,
        score.numel(),
        STRETCH=stretch_of(texts.places, how.branches),
        KEYS=found.shape[1] * how.branches,
        HOW=how,
        SELECT=SelectConstants(candidates, how.budget, how.depth),
        num_warps=warps_for(candidates),
    )
    return tree


@jit
def _best_places(
    found_ptr, request, end, places, STRETCH: tl.constexpr, KEYS: tl.constexpr, B: tl.constexpr
):
    """[≥ B] int32 twice: the best places of all stretches, and how many tokens agree; 0, 0.

    end: the place of the text's last token.
    """
    at = tl.arange(0, next_power_of_2(KEYS))
    written = (at < KEYS) & (at // B * STRETCH < end)
    key = tl.load(found_ptr + request * KEYS + at, mask=written, other=-1)
    branch = tl.arange(0, next_power_of_2(B))
    chosen = tl.zeros_like(branch)
    for b in range(B):
        best = tl.max(key, 0)
        chosen = tl.where(branch == b, tl.maximum(best, 0), chosen)
        key = tl.where(key == best, -1, key)
    return chosen % places, chosen // places


@jit
def _following(text, earlier_ptr, place, ahead, length, width, begin, mask):
    """Return what followed `place` < E + width; beyond the text's end it repeats the period.

    −1 beyond the last one of the earlier texts.
    """
    own = place >= begin
    period = tl.where(own, tl.maximum(begin + length - 1 - place, 1), 1 << 30)
    at = place + 1 + ahead % period
    said = tl.load(text + tl.minimum(at - begin, width - 1), mask=mask & own, other=-1)
    return tl.maximum(
        said, tl.load(earlier_ptr + at, mask=mask & (place < begin) & (at < begin), other=-1)
    )


@jit(do_not_specialize=["row_ptr", "position_ptr", "last_ptr", "earlier_ptr", "size"])
def _follow_kernel(
    table_ptr,  # [S, width] int32
    row_ptr,  # [R] int64
    position_ptr,  # [T] int64
    last_ptr,  # [R] int64
    earlier_ptr,  # [E] int32
    strides,  # Texts, their strides
    width,
    begin,  # E, the place of a text's first token
    found_ptr,  # [R, stretches, B] int32
    fields_ptr,  # [4, R, C] int64: room for candidates
    score_ptr,  # [R, C] fp32
    tree,  # TreeTensors
    size,  # R · C
    STRETCH: tl.constexpr,
    KEYS: tl.constexpr,  # of a request's stretches
    HOW: tl.constexpr,  # Following
    SELECT: tl.constexpr,  # SelectConstants
    DEPTH_ONE: tl.constexpr = DEPTH_ONE,
):
    """Build the tree of one request: its B best occurrences, D tokens of each."""
    B: tl.constexpr = HOW.branches
    D: tl.constexpr = HOW.depth
    request = tl.program_id(0).to(tl.int64)
    length = length_of(position_ptr, last_ptr, strides, request)
    text = table_ptr + tl.load(row_ptr + request * strides.row).to(tl.int64) * strides.table
    end, places = begin + length - 1, begin + width
    place, matched = _best_places(found_ptr, request, end, places, STRETCH, KEYS, B)
    b, k = tl.arange(0, next_power_of_2(B)), tl.arange(0, next_power_of_2(D))
    inside = (b < B)[:, None] & (k < D)[None, :]
    token = _following(text, earlier_ptr, place[:, None], k[None, :], length, width, begin, inside)
    # Up to the end of an earlier text.
    goes_on = tl.cumsum((token < 0).to(tl.int32), 1) == 0

    # Votes for each node, and at its parent.
    votes = tl.zeros_like(token).to(tl.float32)
    before = votes
    # A continuation branches off the first earlier one with the longest common prefix.
    parts, leader = tl.zeros_like(b), tl.zeros_like(b)
    weight = HOW.vote * HOW.votes * tl.exp2(-0.25 * tl.log2((b + 1).to(tl.float32)))
    for other in range(B):
        its_place = tl.sum(tl.where(b == other, place, 0), 0) + tl.zeros_like(k)
        its_match = tl.sum(tl.where(b == other, matched, 0), 0)
        said = _following(text, earlier_ptr, its_place, k, length, width, begin, k < D)
        same = token == said[None, :]
        shared = tl.min(tl.where(same | (k >= D)[None, :], D, k[None, :]), 1)
        agreed = tl.where(its_match > 0, its_match + k, 1).to(tl.float32)
        its_vote = tl.sum(tl.where(b == other, weight, 0.0), 0)
        cast = its_vote * tl.exp2(HOW.power * tl.log2(agreed))
        goes_there = tl.cumsum((said < 0).to(tl.int32), 0) == 0
        cast = tl.where((its_match > 0) & goes_there, tl.floor(cast + 0.5), 0.0)
        heard = tl.where(shared[:, None] >= k[None, :], cast[None, :], 0.0)
        before += heard
        votes += tl.where(same, heard, 0.0)
        longer = (b > other) & (shared > parts)
        leader = tl.where(longer, other, leader)
        parts = tl.where(longer, shared, parts)

    follows = inside & (matched > 0)[:, None] & goes_on
    # Unused entries have no votes: a quotient of 1 avoids NaN.
    whole = tl.where(follows, before, 1.0)
    gain = tl.log(tl.where(follows, votes / whole * votes / (votes + HOW.votes), 1.0))
    total = tl.cumsum(tl.minimum(tl.floor(gain * HOW.nats + 0.5), 0.0), 1) / HOW.nats
    drafted = follows & (k[None, :] >= parts[:, None])
    total = tl.where(drafted, total, float("-inf"))
    owner = tl.where(k[None, :] == parts[:, None], leader[:, None], b[:, None])
    parent = tl.where(k[None, :] > 0, owner * D + k[None, :], 0)
    index = 1 + b[:, None] * D + k[None, :]
    tie = (k[None, :] + 1).to(tl.int64) * DEPTH_ONE + index
    key = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie

    to_token, to_score = fields_ptr + request * SELECT.COUNT, score_ptr + request * SELECT.COUNT
    to_parent, to_key = to_token + size, to_token + 2 * size
    tl.store(to_token, 0)
    tl.store(to_parent, 0)
    tl.store(to_key, 0)
    tl.store(to_score, 0.0)
    tl.store(to_token + index, tl.maximum(token, 0).to(tl.int64), mask=inside)
    tl.store(to_parent + index, parent.to(tl.int64), mask=inside)
    tl.store(to_key + index, key, mask=inside)
    tl.store(to_score + index, total, mask=inside)
    tl.debug_barrier()
    select_part(to_token, to_parent, to_score, to_key, to_key, tree, request, False, SELECT)
