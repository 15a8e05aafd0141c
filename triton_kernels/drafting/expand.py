"""Rank-guided expansion, one launch per block of the drafter, one program per request.

A launch hangs a block's tokens under the nodes that it started from, and then either chooses
where the next block starts or, after the last one, makes the tree (`select_tree.py`). The torch
reference is `vllm_specblock.drafters.specblock.growth.Expansion`, bit for bit but for starts that
are not valid: those are some node, as there, but not always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..tree.candidate_keys import (
    BUCKET_BITS,
    BUCKET_ONE,
    CLOSED,
    DEPTH_ONE,
    FIRST,
    INDEX_BITS,
    MAX_DEPTH,
    PATH_FACTOR,
    ROOT_HASH,
)  # fmt: skip
from ..tree.select_tree import TreeTensors, by_text, select_constants, select_part, warps_for


@dataclass(frozen=True)
class Limits:
    """Sizes of an expansion: K, M, S, B (children looked at per position) and N; and whether starts
    go by rank bucket first."""

    block_size: int
    num_blocks: int
    num_starts: int
    width: int
    budget: int
    starts_by_rank: bool = False

    @property
    def candidates(self) -> int:
        """C, the root included."""
        return self.count(self.num_blocks)

    def count(self, blocks: int) -> int:
        """Candidates once `blocks` blocks hang, the root included."""
        rows = 1 + (blocks - 1) * self.num_starts
        return 1 + rows * self.block_size * self.width


class Growing:
    """What the launches of one expansion share.

    Attributes:
        fields: [6, R, C] int64: token, path hash, key, parent, key as a start, scratch.
        score: [R, C] fp32.
        started: [R, max(1, M-2), S] int64, hashes of the texts that blocks started from.

    Args:
        branching: [4] int64, children per rank bucket; 0: nothing starts there.
    """

    def __init__(self, limits: Limits, branching: torch.Tensor, num_requests: int) -> None:
        self.limits, self.branching, self.num_requests = limits, branching, num_requests
        device = branching.device
        shape = (num_requests, limits.candidates)
        self.fields = torch.empty(6, *shape, dtype=torch.int64, device=device)
        self.score = torch.empty(shape, dtype=torch.float32, device=device)
        started = (num_requests, max(1, limits.num_blocks - 2), limits.num_starts)
        self.started = torch.empty(started, dtype=torch.int64, device=device)

    def attach_block(
        self,
        block: int,
        start_node: torch.Tensor | None,
        start_valid: torch.Tensor | None,
        top_logprob: torch.Tensor,
        top_token: torch.Tensor,
        bucket: torch.Tensor,
    ) -> tuple[torch.Tensor, ...] | TreeTensors:
        """Hang block `block`, and go on.

        Args:
            block: 1 to M.
            start_node: [R, S] int64, candidates that it starts from; None in block 1.
            start_valid: [R, S] bool; None in block 1.
            top_logprob: [R, rows, K, B] fp32, best first; 1 row in block 1, then S.
            top_token: [R, rows, K, B] int64, target vocabulary.
            bucket: [R, rows, K] int64, 0 to 3.

        Returns:
            before the last block the next starts, each [R, S]: node, token, row, position (all
            int64) and valid (bool); after the last one the tree.
        """
        limits, device = self.limits, self.score.device
        last = block == limits.num_blocks
        grown = (self.num_requests, limits.num_starts)
        if last:
            tree = TreeTensors.empty(self.num_requests, limits.budget, self.fields[5])
            result = [*tree.all()]
        else:
            result = [torch.empty(grown, dtype=torch.int64, device=device) for _ in range(4)]
            result.append(torch.empty(grown, dtype=torch.bool, device=device))
        if block == 1:
            start_node = start_valid = self.branching  # not read
        assert start_node is not None and start_valid is not None
        count = limits.count(block)
        rows = 1 if block == 1 else limits.num_starts
        kernel = _attach_and_select_kernel if last else _attach_and_start_kernel
        more = (
            select_constants(count, limits.budget, limits.num_blocks * limits.block_size)
            if last
            else {
                "COUNT": count,
                "PLACES": max(next_power_of_2(count), next_power_of_2(limits.num_starts)),
                "STARTS": max(2, next_power_of_2(limits.num_starts)),  # 3.6 has no top 1
                "CLOSED": CLOSED,
                "INDEX": INDEX_BITS,
                "FACTOR": PATH_FACTOR,
            }
        )
        if self.num_requests:
            kernel[(self.num_requests,)](
                top_logprob.contiguous(), top_token.contiguous(), bucket.contiguous(),
                self.branching, start_node.contiguous(), start_valid.contiguous(), self.fields,
                self.score, self.started, *result, self.score.numel(),
                BLOCK=block, BLOCKS=limits.num_blocks, C=limits.candidates,
                ROWS=rows, K=limits.block_size, B=limits.width, S=limits.num_starts,
                CELLS=next_power_of_2(rows * limits.block_size * limits.width),
                DEPTH=MAX_DEPTH * DEPTH_ONE, DEPTH_ONE=DEPTH_ONE, ROOT=ROOT_HASH, FIRST=FIRST,
                BUCKET=BUCKET_ONE if limits.starts_by_rank else 0, SHIFT=32 + BUCKET_BITS,
                **more, num_warps=warps_for(count),
            )  # fmt: skip
        return tree if last else tuple(result)


@jit
def _attach_block(
    top_logprob, top_token, bucket, branching, start_node, start_valid,
    token, path_hash, key, parent, may_start, score, started,  # one request's
    request,  # int64
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    B: tl.constexpr, S: tl.constexpr, CELLS: tl.constexpr, DEPTH: tl.constexpr,
    DEPTH_ONE: tl.constexpr, ROOT: tl.constexpr, FIRST: tl.constexpr, CLOSED: tl.constexpr,
    FACTOR: tl.constexpr, BUCKET: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One caterpillar per row: a chain of top-1 tokens, each with its siblings."""
    cell = tl.arange(0, CELLS)
    inside = cell < ROWS * K * B
    row, position, branch = cell // (K * B), cell // B % K, cell % B
    if BLOCK == 1:
        tl.store(token, 0)
        tl.store(path_hash, ROOT)
        tl.store(key, 0)
        tl.store(parent, 0)
        tl.store(score, 0.0)
        node = tl.full([CELLS], 0, tl.int64)
        total = tl.full([CELLS], 0.0, tl.float32)
        text = tl.full([CELLS], ROOT, tl.int64)
        above = tl.full([CELLS], 0, tl.int64)
        first_cell = 1
    else:
        node = tl.load(start_node + request * ROWS + row, mask=inside, other=0)
        valid = tl.load(start_valid + request * ROWS + row, mask=inside, other=0).to(tl.int1)
        total = tl.where(valid, tl.load(score + node), float("-inf"))
        text = tl.load(path_hash + node)
        above = tl.load(key + node) & DEPTH
        first_cell = 1 + (1 + (BLOCK - 2) * S) * K * B
        if BLOCK < BLOCKS:
            # The root is no start.
            begun = started + (BLOCK - 2) * S + row
            begins = inside & (cell % (K * B) == 0)
            tl.store(begun, tl.where(valid, text, ROOT), mask=begins)

    line = (request * ROWS + row) * K
    for j in range(K):  # in the order of the chain, as the reference adds
        ahead = inside & (j <= position)
        which = tl.where(j < position, 0, branch)
        gain = tl.load(top_logprob + (line + j) * B + which, mask=ahead, other=0.0)
        word = tl.load(top_token + (line + j) * B + which, mask=ahead, other=0)
        width = tl.load(branching + tl.load(bucket + line + j, mask=inside, other=0))
        # Rounding may leave a certain token's log-probability above 0.
        gain = tl.minimum(tl.where(which < tl.maximum(width, 1), gain, float("-inf")), 0.0)
        total = tl.where(ahead, total + gain, total)
        text = tl.where(ahead, word + text * FACTOR, text)

    index = first_cell + cell
    tie = above + (position + 1).to(tl.int64) * DEPTH_ONE + index
    rank = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie
    own = tl.load(top_token + line * B + cell % (K * B), mask=inside, other=0)
    tl.store(token + index, own, mask=inside)
    tl.store(path_hash + index, text, mask=inside)
    tl.store(key + index, rank, mask=inside)
    tl.store(score + index, total, mask=inside)
    tl.store(parent + index, tl.where(position == 0, node, index - branch - B), mask=inside)
    if BLOCK < BLOCKS:
        level = tl.load(bucket + line + position, mask=inside, other=0)
        width = tl.load(branching + level)
        open_key = rank
        if BUCKET:
            by_bucket = (rank >> SHIFT << 32) + (rank & 0xFFFFFFFF) + level * BUCKET
            open_key = tl.where(rank < CLOSED, by_bucket, rank)
        open_key = tl.where(width > 0, open_key, open_key | CLOSED)
        # The main chain goes on from row 0 of every block, which starts at its last end.
        chain_end = cell == (K - 1) * B
        open_key = tl.where(chain_end, open_key | FIRST, open_key)
        tl.store(may_start + index, open_key, mask=inside)
    tl.debug_barrier()


@jit(do_not_specialize=["size"])
def _attach_and_start_kernel(
    top_logprob, top_token, bucket,  # [R, ROWS, K, B] twice, [R, ROWS, K]
    branching,  # [4]
    start_node, start_valid,  # [R, S]
    fields,  # [6, R, C]
    score,  # [R, C]
    started,  # [R, max(1, BLOCKS-2), S]
    out_node, out_token, out_row, out_position, out_valid,  # [R, S]
    size,  # R · C
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr, CELLS: tl.constexpr, DEPTH: tl.constexpr,
    DEPTH_ONE: tl.constexpr, ROOT: tl.constexpr, FIRST: tl.constexpr,
    BUCKET: tl.constexpr, SHIFT: tl.constexpr,
    COUNT: tl.constexpr, PLACES: tl.constexpr, STARTS: tl.constexpr, CLOSED: tl.constexpr,
    INDEX: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Hang block BLOCK, and choose the S best nodes so far to start from, each text once."""
    request = tl.program_id(0).to(tl.int64)
    token = fields + request * C
    path_hash, key, parent = token + size, token + 2 * size, token + 3 * size
    may_start, scratch = token + 4 * size, token + 5 * size
    score += request * C
    started += request * (max(BLOCKS - 2, 1) * S)
    _attach_block(top_logprob, top_token, bucket, branching, start_node, start_valid,
          token, path_hash, key, parent, may_start, score, started, request,
          BLOCK, BLOCKS, ROWS, K, B, S, CELLS, DEPTH, DEPTH_ONE, ROOT, FIRST, CLOSED, FACTOR,
          BUCKET, SHIFT,
    )  # fmt: skip

    place = tl.arange(0, PLACES)
    inside = (place > 0) & (place < COUNT)
    # Too few candidates for all starts: the last one, closed, stands in.
    closed = tl.minimum(tl.maximum(place, 1), COUNT - 1).to(tl.int64) | CLOSED
    open_key = tl.load(may_start + place, mask=inside, other=0)
    open_key = tl.where(inside, open_key, closed)
    if BLOCK > 1:
        _, candidate, rank, leader = by_text(
            key, path_hash, COUNT, PLACES, INDEX, FACTOR, True, 0x7FFFFFFFFFFFFFFF
        )
        best = (leader == rank).to(tl.int64)
        at = tl.gather(candidate, rank, 0)
        tl.store(scratch + at, best, mask=rank < COUNT)
        tl.debug_barrier()
        text = tl.load(path_hash + place, mask=inside, other=0)
        free = tl.load(scratch + place, mask=inside, other=0) != 0
        for s in range((BLOCK - 1) * S):
            free = free & (text != tl.load(started + s))
        open_key = tl.where(free, open_key, closed)
    # Complemented: the largest are then the smallest keys, in ascending order.
    chosen = ~tl.topk(~open_key, STARTS)
    slot = tl.arange(0, STARTS)
    out = request * S + slot
    node = chosen & INDEX
    drafted = (node - 1) // B
    tl.store(out_node + out, node, mask=slot < S)
    tl.store(out_token + out, tl.load(token + node), mask=slot < S)
    tl.store(out_row + out, drafted // K, mask=slot < S)
    tl.store(out_position + out, drafted % K, mask=slot < S)
    tl.store(out_valid + out, chosen < CLOSED, mask=slot < S)


@jit(do_not_specialize=["size"])
def _attach_and_select_kernel(
    top_logprob, top_token, bucket,  # [R, ROWS, K, B] twice, [R, ROWS, K]
    branching,  # [4]
    start_node, start_valid,  # [R, S]
    fields,  # [6, R, C]
    score,  # [R, C]
    started,
    tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, node,
    size,  # R · C
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr, B: tl.constexpr, S: tl.constexpr, CELLS: tl.constexpr, DEPTH: tl.constexpr,
    DEPTH_ONE: tl.constexpr, ROOT: tl.constexpr, FIRST: tl.constexpr,
    BUCKET: tl.constexpr, SHIFT: tl.constexpr,
    COUNT: tl.constexpr, PLACES: tl.constexpr, BUDGET: tl.constexpr,
    NODES: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    CLOSED: tl.constexpr, INDEX: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Hang the last block, and make the tree."""
    request = tl.program_id(0).to(tl.int64)
    token = fields + request * C
    path_hash, key, parent = token + size, token + 2 * size, token + 3 * size
    score += request * C
    _attach_block(top_logprob, top_token, bucket, branching, start_node, start_valid,
          token, path_hash, key, parent, token, score, started, request,
          BLOCK, BLOCKS, ROWS, K, B, S, CELLS, DEPTH, DEPTH_ONE, ROOT, FIRST, CLOSED, FACTOR,
          BUCKET, SHIFT,
    )  # fmt: skip
    select_part(
        token, parent, score, key, path_hash,
        tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, node, request,
        True, COUNT, PLACES, BUDGET, NODES, W, WORDS, STEPS, CLOSED, INDEX, FACTOR,
    )  # fmt: skip
