"""Selection of a tree from candidates: join equal texts, keep the best, sort.

The torch reference is `vllm_specblock.candidates.select`, bit for bit, except that texts are
compared by 64 - log2(candidates) bits of their hash. Threads exchange values through memory, with
barriers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import cdiv, jit, larger, next_power_of_2, tl
from .candidate_keys import CLOSED, INDEX_BITS, PATH_FACTOR

MOST_CANDIDATES = 2048
"""Maximum candidates that one program sorts in registers; more take minutes to compile."""


class TreeTensors(NamedTuple):
    """R trees of N node slots and W ancestor words, as in `DraftTree`; contiguous.

    node: [R, C] int64, the node of each candidate (0: the root, above N: over the budget); None:
        the tree was not selected here.
    """

    token: torch.Tensor  # [R, N] int64
    parent: torch.Tensor  # [R, N] int32
    depth: torch.Tensor  # [R, N] int32
    logprob: torch.Tensor  # [R, N] fp32
    size: torch.Tensor  # [R] int32
    ancestors: torch.Tensor  # [R, N+1, W] int64
    node: Any  # [R, C] int64, or None

    @classmethod
    def of(cls, tree: Any) -> TreeTensors:
        """Return the tensors of a `DraftTree`."""
        return cls._make([*(getattr(tree, x).contiguous() for x in cls._fields[:-1]), None])

    @classmethod
    def empty(cls, num_requests: int, budget: int, node: torch.Tensor) -> TreeTensors:
        """Return uninitialised tensors; budget: N; node: becomes the attribute."""
        words = cdiv(budget + 1, 64)
        nodes = (num_requests, budget)
        shapes = [nodes] * 4 + [(num_requests,), (num_requests, budget + 1, words)]
        dtypes = torch.int64, torch.int32, torch.int32, torch.float32, torch.int32, torch.int64
        made = (torch.empty(x, dtype=y, device=node.device) for x, y in zip(shapes, dtypes))
        return cls._make([*made, node])


class Candidates(NamedTuple):
    """C candidates of R requests, the root first; [R, C] each."""

    token: torch.Tensor  # int64, target vocabulary
    parent: torch.Tensor  # int64, the parent candidate
    score: torch.Tensor  # fp32, cumulative log-score, never above the parent's
    key: torch.Tensor  # int64, see `candidate_keys.py`
    path_hash: torch.Tensor | None  # int64, likewise; None: no two texts are equal


class SelectConstants(NamedTuple):
    """Compile-time constants of `select_part`."""

    COUNT: int  # C
    BUDGET: int  # N
    MAX_DEPTH: int  # no path is longer


def warps_for(candidates: int) -> int:
    """Return num_warps for `candidates`: one candidate per thread, up to 512.

    Sorting dominates: few threads with many candidates are slower than barriers of many threads.
    """
    return min(max(next_power_of_2(candidates) // 32, 4), 16)


def select_triton(given: Candidates, budget: int, max_depth: int) -> TreeTensors:
    """Launch the selection; see `vllm_specblock.candidates.select`; C: at most MOST_CANDIDATES."""
    key, joins = given.key, given.path_hash is not None
    fields = Candidates._make((key if x is None else x).contiguous() for x in given)
    num_requests, count = key.shape
    tree = TreeTensors.empty(num_requests, budget, torch.empty_like(key).contiguous())
    _select_kernel[(num_requests,)](
        fields,
        tree,
        JOINS=joins,
        SELECT=SelectConstants(count, budget, max_depth),
        num_warps=warps_for(count),
    )
    return tree


@jit
def by_text(
    key_ptr,  # [COUNT] int64
    path_hash_ptr,  # [COUNT] int64, read only if JOINS
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    JOINS: tl.constexpr,
    INDEX: tl.constexpr = INDEX_BITS,
    FACTOR: tl.constexpr = PATH_FACTOR,
):
    """Rank one request's candidates, and find the best of every text.

    Returns, over PLACES places: the sorted keys, the candidates from best to worst, and in the
    order of texts (JOINS only) ranks and, for each, the best rank of the same text.
    """
    place = tl.arange(0, PLACES)
    # Padding sorts after all candidates.
    ranked = tl.sort(tl.load(key_ptr + place, mask=place < COUNT, other=0x7FFFFFFFFFFFFFFF))
    candidate = (ranked & INDEX).to(tl.int32)
    rank, leader = place, place
    if JOINS:
        text = tl.load(path_hash_ptr + candidate, mask=place < COUNT, other=0)
        # Low bits make room for the rank. The product brings what they held into the others:
        # siblings' hashes differ in their low bits alone.
        by_hash = tl.sort((text * FACTOR & -PLACES) | place.to(tl.int64))
        rank = (by_hash & (PLACES - 1)).to(tl.int32)
        before = tl.gather(by_hash, tl.maximum(place - 1, 0), 0)
        leads = (place == 0) | ((by_hash & -PLACES) != (before & -PLACES))
        # Places ascend: of the leaders so far the largest number is the latest leader's.
        numbered = tl.where(leads, place.to(tl.int64) * PLACES + rank, 0)
        leader = (tl.associative_scan(numbered, 0, larger) & (PLACES - 1)).to(tl.int32)
    return ranked, candidate, rank, leader


@jit
def select_part(
    token_ptr,  # [COUNT] int64, as the four after it one request's candidates
    parent_ptr,  # int64
    score_ptr,  # fp32
    key_ptr,  # int64
    path_hash_ptr,  # int64, read only if JOINS
    tree,  # TreeTensors, of all requests
    request,  # int64
    JOINS: tl.constexpr,
    SELECT: tl.constexpr,  # SelectConstants
    CLOSED: tl.constexpr = CLOSED,
):
    """Build the tree of one request's candidates."""
    PLACES: tl.constexpr = next_power_of_2(SELECT.COUNT)
    NODES: tl.constexpr = next_power_of_2(SELECT.BUDGET + 1)
    W: tl.constexpr = SELECT.BUDGET // 64 + 1
    WORDS: tl.constexpr = next_power_of_2(W)
    # Doublings that reach from the deepest node to the root.
    STEPS: tl.constexpr = max(0, min(SELECT.MAX_DEPTH, SELECT.BUDGET) - 1).bit_length()
    place = tl.arange(0, PLACES)
    inside = place < SELECT.COUNT
    node = tree.node + request * SELECT.COUNT
    ranked, candidate, rank, leader = by_text(key_ptr, path_hash_ptr, SELECT.COUNT, PLACES, JOINS)
    kept = inside & (ranked < CLOSED)
    winner = place
    if JOINS:
        tl.store(node + rank, leader.to(tl.int64), mask=rank < SELECT.COUNT)
        tl.debug_barrier()
        winner = tl.load(node + place, mask=inside, other=0).to(tl.int32)
        kept = kept & (winner == place)
        tl.debug_barrier()  # all threads must have read before the memory is reused
    number = tl.cumsum(kept.to(tl.int32), 0) - 1  # 0 is the root
    of_text = tl.gather(number, winner, 0) if JOINS else number
    tl.store(node + candidate, of_text.to(tl.int64), mask=inside)
    tl.debug_barrier()

    total = tl.sum(kept.to(tl.int32), 0) - 1
    size = tl.minimum(total, SELECT.BUDGET)
    chosen = kept & (number > 0) & (number <= SELECT.BUDGET)
    out = request * SELECT.BUDGET + number - 1
    above = tl.load(parent_ptr + candidate, mask=chosen, other=0)
    above = tl.load(node + above, mask=chosen, other=0).to(tl.int32)
    tl.store(tree.parent + out, above, mask=chosen)
    tl.store(tree.token + out, tl.load(token_ptr + candidate, mask=chosen, other=0), mask=chosen)
    score = tl.load(score_ptr + candidate, mask=chosen, other=0.0)
    tl.store(tree.logprob + out, score, mask=chosen)
    tl.store(tree.size + request, size)
    tl.debug_barrier()

    # Ancestors by pointer doubling: after step s a node knows 2^s nodes of its path. Those are
    # new nodes, so sums are unions. Unused slots are children of the root.
    slot = tl.arange(0, NODES)
    stored = (slot > 0) & (slot <= SELECT.BUDGET)
    out = request * SELECT.BUDGET + slot - 1
    used = stored & (slot <= size)
    unused = stored & (slot > size)
    jump = tl.load(tree.parent + out, mask=used, other=0)
    tl.store(tree.parent + out, tl.full([NODES], -1, tl.int32), mask=unused)
    tl.store(tree.token + out, tl.full([NODES], 0, tl.int64), mask=unused)
    tl.store(tree.logprob + out, tl.full([NODES], float("-inf"), tl.float32), mask=unused)
    word = tl.arange(0, WORDS)
    bit = tl.full([NODES], 1, tl.int64) << (slot % 64)
    own = (slot[:, None] // 64 == word[None, :]) & (slot > 0)[:, None]
    path = tl.where(own, bit[:, None], 0)
    depth = (slot > 0).to(tl.int32)
    for step in tl.static_range(STEPS):
        if step > 0:
            jump = tl.gather(jump, jump, 0)
        path += tl.gather(path, tl.broadcast_to(jump[:, None], [NODES, WORDS]), 0)
        depth += tl.gather(depth, jump, 0)
    path = tl.where((word == 0)[None, :], path | 1, path)
    at = (request * (SELECT.BUDGET + 1) + slot) * W
    tl.store(
        tree.ancestors + at[:, None] + word[None, :],
        path,
        mask=(slot <= SELECT.BUDGET)[:, None] & (word < W)[None, :],
    )
    tl.store(tree.depth + out, depth, mask=stored)


@jit
def _select_kernel(
    given,  # Candidates, contiguous
    tree,  # TreeTensors
    JOINS: tl.constexpr,
    SELECT: tl.constexpr,  # SelectConstants
):
    request = tl.program_id(0).to(tl.int64)
    at = request * SELECT.COUNT
    token, parent, score = given.token + at, given.parent + at, given.score + at
    key, path_hash = given.key + at, given.path_hash + at
    select_part(token, parent, score, key, path_hash, tree, request, JOINS, SELECT)
