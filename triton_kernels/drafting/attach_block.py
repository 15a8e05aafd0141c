"""One block's candidates, the part that every launch of an expansion begins with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, tl


class BlockDrafts(NamedTuple):
    """A block's tokens, and what they are hung under."""

    top_logprob: torch.Tensor  # [R, ROWS, K, B] fp32
    top_token: torch.Tensor  # [R, ROWS, K, B] int64
    bucket: torch.Tensor  # [R, ROWS, K] int64
    branching: torch.Tensor  # [4] int64
    start_node: torch.Tensor  # [R, S] int64
    start_valid: torch.Tensor  # [R, S] bool


class BlockConstants(NamedTuple):
    """What a launch is compiled for; letters as in `Limits`, C: all candidates of a request."""

    BLOCK: int
    BLOCKS: int
    C: int
    ROWS: int
    K: int
    B: int
    S: int
    CELLS: int  # >= ROWS · K · B
    DEPTH: int  # the depth's bits of a key; as all below: see `candidate_keys.py`
    DEPTH_ONE: int
    ROOT: int
    FIRST: int
    CLOSED: int
    INDEX: int
    FACTOR: int


@jit
def attach_part(
    drafts,  # BlockDrafts
    token,  # [C] int64, as the four after it one request's
    path_hash,
    key,
    parent,
    may_start,  # written before the last block
    score,  # [C] fp32
    started,  # [max(1, BLOCKS-2), S] int64, one request's
    request,  # int64
    GROW: tl.constexpr,  # BlockConstants
):
    """One caterpillar per row: a chain of top-1 tokens, each with its siblings."""
    cell = tl.arange(0, GROW.CELLS)
    inside = cell < GROW.ROWS * GROW.K * GROW.B
    row, position, branch = cell // (GROW.K * GROW.B), cell // GROW.B % GROW.K, cell % GROW.B
    if GROW.BLOCK == 1:
        tl.store(token, 0)
        tl.store(path_hash, GROW.ROOT)
        tl.store(key, 0)
        tl.store(parent, 0)
        tl.store(score, 0.0)
        node = tl.full([GROW.CELLS], 0, tl.int64)
        total = tl.full([GROW.CELLS], 0.0, tl.float32)
        text = tl.full([GROW.CELLS], GROW.ROOT, tl.int64)
        above = tl.full([GROW.CELLS], 0, tl.int64)
        first_cell = 1
    else:
        start = request * GROW.ROWS + row
        node = tl.load(drafts.start_node + start, mask=inside, other=0)
        valid = tl.load(drafts.start_valid + start, mask=inside, other=0).to(tl.int1)
        total = tl.where(valid, tl.load(score + node), float("-inf"))
        text = tl.load(path_hash + node)
        above = tl.load(key + node) & GROW.DEPTH
        first_cell = 1 + (1 + (GROW.BLOCK - 2) * GROW.S) * GROW.K * GROW.B
        if GROW.BLOCK < GROW.BLOCKS:
            # The root is no start.
            begun = started + (GROW.BLOCK - 2) * GROW.S + row
            begins = inside & (cell % (GROW.K * GROW.B) == 0)
            tl.store(begun, tl.where(valid, text, GROW.ROOT), mask=begins)

    line = (request * GROW.ROWS + row) * GROW.K
    for j in range(GROW.K):  # in the order of the chain, as the reference adds
        ahead = inside & (j <= position)
        which = tl.where(j < position, 0, branch)
        gain = tl.load(drafts.top_logprob + (line + j) * GROW.B + which, mask=ahead, other=0.0)
        word = tl.load(drafts.top_token + (line + j) * GROW.B + which, mask=ahead, other=0)
        width = tl.load(drafts.branching + tl.load(drafts.bucket + line + j, mask=inside, other=0))
        # Rounding may leave a certain token's log-probability above 0.
        gain = tl.minimum(tl.where(which < tl.maximum(width, 1), gain, float("-inf")), 0.0)
        total = tl.where(ahead, total + gain, total)
        text = tl.where(ahead, word + text * GROW.FACTOR, text)

    index = first_cell + cell
    tie = above + (position + 1).to(tl.int64) * GROW.DEPTH_ONE + index
    rank = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie
    own = tl.load(drafts.top_token + line * GROW.B + cell % (GROW.K * GROW.B), mask=inside, other=0)
    tl.store(token + index, own, mask=inside)
    tl.store(path_hash + index, text, mask=inside)
    tl.store(key + index, rank, mask=inside)
    tl.store(score + index, total, mask=inside)
    tl.store(parent + index, tl.where(position == 0, node, index - branch - GROW.B), mask=inside)
    if GROW.BLOCK < GROW.BLOCKS:
        level = tl.load(drafts.bucket + line + position, mask=inside, other=0)
        width = tl.load(drafts.branching + level)
        open_key = tl.where(width > 0, rank, rank | GROW.CLOSED)
        # The main chain goes on from row 0 of every block, which starts at its last end.
        chain_end = cell == (GROW.K - 1) * GROW.B
        open_key = tl.where(chain_end, open_key | GROW.FIRST, open_key)
        tl.store(may_start + index, open_key, mask=inside)
    tl.debug_barrier()
