"""Candidates of a tree: grow them block by block, join equal texts, keep the best, order them.

One program per request does in one launch what takes torch some sixty. Everything that a program
needs of another thread goes through memory of its own request, with a barrier between.

The torch reference, bit for bit, is `vllm_specblock.candidates.select` and, for growth,
`vllm_specblock.drafters.specblock.growth.Expansion`. One thing differs that nobody will see: texts
are told apart by 64 - log2(candidates) bits of their mixed hash instead of all 64, since a sort
carries one int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .candidate_keys import CLOSED, INDEX_BITS, PATH_FACTOR

MOST_CANDIDATES = 2048
"""Candidates of a request that one program sorts in its registers. Beyond, compiling alone takes
minutes."""


@dataclass(frozen=True)
class TreeTensors:
    """What a DraftTree holds, for R requests, N node slots and W ancestor words.

    Attributes: token [R, N] int64, parent and depth [R, N] int32, logprob [R, N] fp32,
        size [R] int32, ancestors [R, N+1, W] int64, and node [R, C] int64, the node that each
        candidate is or has joined (0 is the root, more than N: over the budget).
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    logprob: torch.Tensor
    size: torch.Tensor
    ancestors: torch.Tensor
    node: torch.Tensor

    @classmethod
    def empty(cls, num_requests: int, budget: int, node: torch.Tensor) -> TreeTensors:
        """Nothing is written yet; budget: N; node: [R, C] int64, becomes the attribute."""
        words = -(-(budget + 1) // 64)
        nodes, device = (num_requests, budget), node.device
        return cls(
            torch.empty(nodes, dtype=torch.int64, device=device),
            torch.empty(nodes, dtype=torch.int32, device=device),
            torch.empty(nodes, dtype=torch.int32, device=device),
            torch.empty(nodes, dtype=torch.float32, device=device),
            torch.empty(num_requests, dtype=torch.int32, device=device),
            torch.empty(num_requests, budget + 1, words, dtype=torch.int64, device=device),
            node,
        )

    def all(self) -> tuple[torch.Tensor, ...]:
        """In the order in which the kernels take them."""
        return (
            self.token, self.parent, self.depth, self.logprob, self.size, self.ancestors, self.node
        )  # fmt: skip


def warps_for(candidates: int) -> int:
    """num_warps of a program over `candidates`: one of them per thread, up to 512.

    What such a program waits for is its own sorting, exchange by exchange: few threads with many
    candidates each take longer than many threads take to meet.
    """
    return min(max(next_power_of_2(candidates) // 32, 4), 16)


def select_constants(count: int, budget: int, max_depth: int) -> dict[str, int]:
    """The compile-time arguments of `select_part`; arguments as in `select_triton`."""
    words = -(-(budget + 1) // 64)
    return {
        "COUNT": count,
        "PLACES": next_power_of_2(count),
        "BUDGET": budget,
        "NODES": next_power_of_2(budget + 1),
        "W": words,
        "WORDS": next_power_of_2(words),
        "STEPS": max(0, min(max_depth, budget) - 1).bit_length(),
        "CLOSED": CLOSED,
        "INDEX": INDEX_BITS,
        "FACTOR": PATH_FACTOR,
    }


def select_triton(
    token: torch.Tensor,
    parent: torch.Tensor,
    score: torch.Tensor,
    key: torch.Tensor,
    path_hash: torch.Tensor | None,
    budget: int,
    max_depth: int,
) -> TreeTensors:
    """Launch the selection; arguments as in `vllm_specblock.candidates.select`, each [R, C].

    C is at most MOST_CANDIDATES; rows may be strided, entries of a row are consecutive.
    """
    fields = [token, parent, score, key]
    fields = [x if x.stride(1) == 1 else x.contiguous() for x in fields]
    joins = path_hash is not None
    path_hash = fields[3] if path_hash is None else path_hash.contiguous()
    num_requests, count = key.shape
    tree = TreeTensors.empty(num_requests, budget, torch.empty_like(key).contiguous())
    if num_requests:
        _select_kernel[(num_requests,)](
            *fields, path_hash, *(x.stride(0) for x in (*fields, path_hash)), *tree.all(),
            JOINS=joins, **select_constants(count, budget, max_depth), num_warps=warps_for(count),
        )  # fmt: skip
    return tree


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def by_text(key, path_hash, COUNT: tl.constexpr, PLACES: tl.constexpr, INDEX: tl.constexpr,
            FACTOR: tl.constexpr, JOINS: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """Rank one request's candidates, and find the best of every text.

    key, path_hash: its COUNT candidates. Returns, over PLACES places: the sorted keys, the
    candidates from best to worst, and in the order of texts (JOINS only) ranks and, for each, the
    best rank of the same text.
    """
    place = tl.arange(0, PLACES)
    # What pads the sort stands behind all candidates.
    ranked = tl.sort(tl.load(key + place, mask=place < COUNT, other=LAST))
    candidate = (ranked & INDEX).to(tl.int32)
    rank, leader = place, place
    if JOINS:
        text = tl.load(path_hash + candidate, mask=place < COUNT, other=0)
        # Low bits make room for the rank. The product brings what they held into the others:
        # siblings' hashes differ in their low bits alone.
        by_hash = tl.sort((text * FACTOR & -PLACES) | place.to(tl.int64))
        rank = (by_hash & (PLACES - 1)).to(tl.int32)
        before = tl.gather(by_hash, tl.maximum(place - 1, 0), 0)
        leads = (place == 0) | ((by_hash & -PLACES) != (before & -PLACES))
        # Places ascend: of the leaders so far the largest number is the latest leader's.
        numbered = tl.where(leads, place.to(tl.int64) * PLACES + rank, 0)
        leader = (tl.associative_scan(numbered, 0, _larger) & (PLACES - 1)).to(tl.int32)
    return ranked, candidate, rank, leader


@jit
def select_part(
    token, parent, score, key, path_hash,  # one request's candidates
    tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, node,
    request,  # int64
    JOINS: tl.constexpr, COUNT: tl.constexpr, PLACES: tl.constexpr, BUDGET: tl.constexpr,
    NODES: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    CLOSED: tl.constexpr, INDEX: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """From one request's candidates to its tree; the tree's tensors are those of all requests."""
    place = tl.arange(0, PLACES)
    inside = place < COUNT
    node += request * COUNT
    ranked, candidate, rank, leader = by_text(
        key, path_hash, COUNT, PLACES, INDEX, FACTOR, JOINS, 0x7FFFFFFFFFFFFFFF
    )
    kept = inside & (ranked < CLOSED)
    winner = place
    if JOINS:
        tl.store(node + rank, leader.to(tl.int64), mask=rank < COUNT)
        tl.debug_barrier()
        winner = tl.load(node + place, mask=inside, other=0).to(tl.int32)
        kept = kept & (winner == place)
        tl.debug_barrier()  # everybody has read before the memory is used again
    number = tl.cumsum(kept.to(tl.int32), 0) - 1  # 0 is the root
    of_text = tl.gather(number, winner, 0) if JOINS else number
    tl.store(node + candidate, of_text.to(tl.int64), mask=inside)
    tl.debug_barrier()

    total = tl.sum(kept.to(tl.int32), 0) - 1
    size = tl.minimum(total, BUDGET)
    chosen = kept & (number > 0) & (number <= BUDGET)
    out = request * BUDGET + number - 1
    above = tl.load(parent + candidate, mask=chosen, other=0)
    above = tl.load(node + above, mask=chosen, other=0).to(tl.int32)
    tl.store(tree_parent + out, above, mask=chosen)
    tl.store(tree_token + out, tl.load(token + candidate, mask=chosen, other=0), mask=chosen)
    tl.store(tree_logprob + out, tl.load(score + candidate, mask=chosen, other=0.0), mask=chosen)
    tl.store(tree_size + request, size)
    tl.debug_barrier()

    # Ancestors by pointer doubling: after step s a node knows 2^s nodes of its path. Those are
    # other nodes than it knew, so sums are unions. Slots not in use hang from the root.
    slot = tl.arange(0, NODES)
    stored = (slot > 0) & (slot <= BUDGET)
    out = request * BUDGET + slot - 1
    used = stored & (slot <= size)
    unused = stored & (slot > size)
    jump = tl.load(tree_parent + out, mask=used, other=0)
    tl.store(tree_parent + out, tl.full([NODES], -1, tl.int32), mask=unused)
    tl.store(tree_token + out, tl.full([NODES], 0, tl.int64), mask=unused)
    tl.store(tree_logprob + out, tl.full([NODES], float("-inf"), tl.float32), mask=unused)
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
    at = (request * (BUDGET + 1) + slot) * W
    tl.store(
        ancestors + at[:, None] + word[None, :], path,
        mask=(slot <= BUDGET)[:, None] & (word < W)[None, :],
    )  # fmt: skip
    tl.store(tree_depth + out, depth, mask=stored)


@jit
def _select_kernel(
    token, parent, score, key, path_hash,  # each [R, COUNT], entries consecutive
    token_stride, parent_stride, score_stride, key_stride, hash_stride,
    tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, node,
    JOINS: tl.constexpr, COUNT: tl.constexpr, PLACES: tl.constexpr, BUDGET: tl.constexpr,
    NODES: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    CLOSED: tl.constexpr, INDEX: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    select_part(
        token + request * token_stride, parent + request * parent_stride,
        score + request * score_stride, key + request * key_stride,
        path_hash + request * hash_stride,
        tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, node, request,
        JOINS, COUNT, PLACES, BUDGET, NODES, W, WORDS, STEPS, CLOSED, INDEX, FACTOR,
    )  # fmt: skip
