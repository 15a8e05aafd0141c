"""Tree growth in one launch per block of the drafter, one program per request.

It is SpecBlock's rank-guided expansion, and with blocks of one position EAGLE-2's growth by levels.
The torch reference is `vllm_specblock.drafters.specblock.growth.Expansion`, bit for bit except
invalid starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..optional_triton import constexpr_function, jit, next_power_of_2, tl
from ..tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    FIRST,
    INDEX_BITS,
    MAX_DEPTH,
    PATH_FACTOR,
    ROOT_HASH,
)
from ..tree.select_tree import SelectConstants, TreeTensors, by_text, select_part, warps_for

_DEPTH_BITS = MAX_DEPTH * DEPTH_ONE  # of a key


@dataclass(frozen=True)
class TreeShape:
    """Sizes of an expansion; raises ValueError for paths of more than 255 tokens."""

    block_size: int  # K, positions per block
    num_blocks: int  # M
    num_starts: int  # S, rows of every block after the first
    # Children per rank bucket; at a position of 0 only the chain's own node is attached, and no
    # block starts.
    branching: tuple[int, int, int, int]
    budget: int  # N, nodes of the tree
    # A block starts from nodes of the block before it only, and no two texts are equal.
    by_level: bool = False

    def __post_init__(self) -> None:
        if self.max_depth > MAX_DEPTH:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} positions draft paths of "
                f"{self.max_depth} tokens, but at most {MAX_DEPTH} are supported."
            )

    @classmethod
    def levels(cls, depth: int, top_k: int, width: int, budget: int) -> TreeShape:
        """EAGLE-2: `depth` levels, `top_k` children of a row, `width` rows from level 2 on."""
        return cls(1, depth, width, (top_k,) * 4, budget, by_level=True)

    @property
    def width(self) -> int:
        """B, candidates that are looked at per position."""
        return max(1, *self.branching)

    @property
    def max_depth(self) -> int:
        """M · K, tokens on the longest path."""
        return self.num_blocks * self.block_size

    @property
    def candidates(self) -> int:
        """C, the root included."""
        return self.count(self.num_blocks)

    def count(self, blocks: int) -> int:
        """Candidates once `blocks` blocks hang, the root included."""
        return 1 + self.rows(blocks) * self.block_size * self.width

    def rows(self, blocks: int) -> int:
        """Drafted rows of `blocks` blocks: the drafting row, and S per further block."""
        return 1 + (blocks - 1) * self.num_starts if blocks else 0


class Growing:
    """Shared tensors of one expansion's launches.

    Attributes:
        fields: [6, R, C] int64: token, path hash, key, parent, key as a start, scratch.
        score: [R, C] fp32.
        started: [R, max(1, M-2), S] int64, hashes of the texts that blocks started from.
        block: the newest.

    Args:
        branching: [4] int64, `shape.branching` on the device.
    """

    def __init__(self, shape: TreeShape, branching: torch.Tensor, num_requests: int) -> None:
        self.shape, self.branching, self.num_requests = shape, branching, num_requests
        self.block = 0
        size, device = (num_requests, shape.candidates), branching.device
        self.fields = torch.empty(6, *size, dtype=torch.int64, device=device)
        self.score = torch.empty(size, dtype=torch.float32, device=device)
        started = (num_requests, max(1, shape.num_blocks - 2), shape.num_starts)
        self.started = torch.empty(started, dtype=torch.int64, device=device)

    def attach(
        self,
        starts: NextStarts | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
        bucket: torch.Tensor | None = None,
    ) -> NextStarts | TreeTensors:
        """Hang a block under its starts; return the next starts, or at last the trees.

        Args:
            starts: what the last call returned; None in block 1.
            logprob: [R, rows, K, B] fp32, best first; 1 row in block 1, then S.
            token: [R, rows, K, B] int64, target vocabulary.
            bucket: [R, rows, K] int64, 0 to 3; None: every position has B children.
        """
        self.block += 1
        shape, device, block = self.shape, self.score.device, self.block
        last, done = block == shape.num_blocks, shape.rows(block - 1)
        rows, count = shape.rows(block) - done, shape.count(block)
        # Block 1 reads no starts.
        node, valid = (self.branching,) * 2 if starts is None else (starts.node, starts.valid)
        given = logprob, token, bucket, self.branching, node, valid
        drafts = BlockDrafts._make(None if x is None else x.contiguous() for x in given)
        constants = BlockConstants(
            ROOT=starts is None,
            BLOCKS=shape.num_blocks,
            C=shape.candidates,
            ROWS=rows,
            K=shape.block_size,
            B=shape.width,
            S=shape.num_starts,
            STARTED=0 if last or shape.by_level else (block - 1) * shape.num_starts,
            REOPENS=not last and not shape.by_level,
        )
        kept, numbers = (self.fields, self.score, self.started), (self.score.numel(), done)
        grid = (self.num_requests,)
        if last:
            tree = TreeTensors.empty(self.num_requests, shape.budget, self.fields[5])
            _attach_and_select_kernel[grid](
                drafts,
                *kept,
                tree,
                *numbers,
                constants,
                JOINS=not shape.by_level,
                SELECT=SelectConstants(count, shape.budget, shape.max_depth),
                num_warps=warps_for(count),
            )
            return tree
        size, dtypes = (self.num_requests, shape.num_starts), (*[torch.int64] * 4, torch.bool)
        next_starts = NextStarts._make([torch.empty(size, dtype=x, device=device) for x in dtypes])
        # The levels after the first are one program, whichever their number.
        cells = cells_of(constants.S, constants.ROWS * constants.K * constants.B)
        looks_at = cells if shape.by_level else count
        _attach_and_start_kernel[grid](
            drafts,
            *kept,
            next_starts,
            *numbers,
            constants,
            COUNT=0 if shape.by_level else count,
            num_warps=1 if shape.by_level and looks_at <= 128 else warps_for(looks_at),
        )
        return next_starts


class BlockDrafts(NamedTuple):
    """A block's tokens and starts, contiguous."""

    top_logprob: torch.Tensor  # [R, ROWS, K, B] fp32
    top_token: torch.Tensor  # [R, ROWS, K, B] int64
    bucket: torch.Tensor | None  # [R, ROWS, K] int64
    branching: torch.Tensor  # [4] int64
    start_node: torch.Tensor  # [R, S] int64
    start_valid: torch.Tensor  # [R, S] bool


class BlockConstants(NamedTuple):
    """What a launch is compiled for; letters as in `TreeShape`, C: all candidates of a request."""

    ROOT: bool  # block 1
    BLOCKS: int
    C: int
    ROWS: int
    K: int
    B: int
    S: int
    STARTED: int  # texts that blocks have started from, and that start no other one
    REOPENS: bool  # later blocks may start from any block's nodes


@constexpr_function
def cells_of(starts: int, candidates: int) -> int:
    """Return the size of a block's tensors, as tl.topk takes them: S and ROWS · K · B fit.

    Takes numbers: Triton 3.6 passes a named tuple as a plain tuple.
    """
    return next_power_of_2(max(2, starts, candidates))


class NextStarts(NamedTuple):
    """Nodes from which the next block grows, S per request: [R, S] each."""

    node: torch.Tensor  # int64, candidate index
    token: torch.Tensor  # int64
    # int64, the drafted row that the node came from: 0 is the drafting row, the s-th start of
    # block m is row 1 + (m − 2)·S + s.
    row: torch.Tensor
    position: torch.Tensor  # int64, 0-based position in that row
    valid: torch.Tensor  # bool; the others are there for the shape's sake


@jit
def _attach_block(
    drafts,  # BlockDrafts
    token_ptr,  # [C] int64, the first of one request's fields, which lie `size` apart
    size,
    score_ptr,  # [C] fp32
    started_ptr,  # [max(1, BLOCKS-2), S] int64, one request's
    request,  # int64
    done,  # drafted rows of earlier blocks
    GROW: tl.constexpr,  # BlockConstants
    ROOT_TEXT: tl.constexpr = ROOT_HASH,
    DEPTH: tl.constexpr = _DEPTH_BITS,
    DEPTH_ONE: tl.constexpr = DEPTH_ONE,
    FACTOR: tl.constexpr = PATH_FACTOR,
    FIRST: tl.constexpr = FIRST,
    CLOSED: tl.constexpr = CLOSED,
):
    """Attach one caterpillar per row: a chain of top-1 tokens, each with its siblings.

    Returns [CELLS] int64, the candidates' keys as starts; where there is none, the last is closed.
    """
    path_hash_ptr, key_ptr, parent_ptr = (
        token_ptr + size,
        token_ptr + 2 * size,
        token_ptr + 3 * size,
    )
    CELLS: tl.constexpr = cells_of(GROW.S, GROW.ROWS * GROW.K * GROW.B)
    cell = tl.arange(0, CELLS)
    inside = cell < GROW.ROWS * GROW.K * GROW.B
    row, position, branch = cell // (GROW.K * GROW.B), cell // GROW.B % GROW.K, cell % GROW.B
    if GROW.ROOT:
        tl.store(token_ptr, 0)
        tl.store(path_hash_ptr, ROOT_TEXT)
        tl.store(key_ptr, 0)
        tl.store(parent_ptr, 0)
        tl.store(score_ptr, 0.0)
        node = tl.full([CELLS], 0, tl.int64)
        total = tl.full([CELLS], 0.0, tl.float32)
        text = tl.full([CELLS], ROOT_TEXT, tl.int64)
        above = tl.full([CELLS], 0, tl.int64)
    else:
        start = request * GROW.ROWS + row
        node = tl.load(drafts.start_node + start, mask=inside, other=0)
        valid = tl.load(drafts.start_valid + start, mask=inside, other=0).to(tl.int1)
        total = tl.where(valid, tl.load(score_ptr + node), float("-inf"))
        text = tl.load(path_hash_ptr + node)
        above = tl.load(key_ptr + node) & DEPTH
        if GROW.REOPENS:
            # The root is not a start.
            begins = inside & (cell % (GROW.K * GROW.B) == 0)
            tl.store(started_ptr + done - 1 + row, tl.where(valid, text, ROOT_TEXT), mask=begins)

    line = (request * GROW.ROWS + row) * GROW.K
    for j in range(GROW.K):  # in the order of the chain, as the reference adds
        ahead = inside & (j <= position)
        which = tl.where(j < position, 0, branch)
        gain = tl.load(drafts.top_logprob + (line + j) * GROW.B + which, mask=ahead, other=0.0)
        word = tl.load(drafts.top_token + (line + j) * GROW.B + which, mask=ahead, other=0)
        if drafts.bucket is not None:
            level = tl.load(drafts.bucket + line + j, mask=inside, other=0)
            width = tl.maximum(tl.load(drafts.branching + level), 1)
            gain = tl.where(which < width, gain, float("-inf"))
        # Rounding may leave a certain token's log-probability above 0.
        total = tl.where(ahead, total + tl.minimum(gain, 0.0), total)
        text = tl.where(ahead, word + text * FACTOR, text)

    index = 1 + done * (GROW.K * GROW.B) + cell
    tie = above + (position + 1).to(tl.int64) * DEPTH_ONE + index
    rank = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie
    own = tl.load(drafts.top_token + line * GROW.B + cell % (GROW.K * GROW.B), mask=inside, other=0)
    tl.store(token_ptr + index, own, mask=inside)
    tl.store(path_hash_ptr + index, text, mask=inside)
    tl.store(key_ptr + index, rank, mask=inside)
    tl.store(score_ptr + index, total, mask=inside)
    chained = index - branch - GROW.B
    tl.store(parent_ptr + index, tl.where(position == 0, node, chained), mask=inside)
    open_key = rank
    if drafts.bucket is not None:
        level = tl.load(drafts.bucket + line + position, mask=inside, other=0)
        open_key = tl.where(tl.load(drafts.branching + level) > 0, rank, rank | CLOSED)
    if GROW.REOPENS:
        # The main chain goes on from row 0 of every block, which starts at its last end.
        chain_end = cell == (GROW.K - 1) * GROW.B
        open_key = tl.where(chain_end, open_key | FIRST, open_key)
        tl.store(token_ptr + 4 * size + index, open_key, mask=inside)
    tl.debug_barrier()
    final = (done + GROW.ROWS) * (GROW.K * GROW.B)
    return tl.where(inside, open_key, final.to(tl.int64) | CLOSED)


@jit(do_not_specialize=["size", "done"])
def _attach_and_start_kernel(
    drafts,  # BlockDrafts
    fields_ptr,  # [6, R, C] int64
    score_ptr,  # [R, C] fp32
    started_ptr,  # [R, max(1, BLOCKS-2), S] int64
    starts,  # NextStarts
    size,  # R · C
    done,  # drafted rows of earlier blocks
    GROW: tl.constexpr,  # BlockConstants
    COUNT: tl.constexpr,  # candidates so far; not read unless some texts have started blocks
    CLOSED: tl.constexpr = CLOSED,
    INDEX: tl.constexpr = INDEX_BITS,
):
    """Attach a block, and choose the S best nodes as starts, each text once."""
    STARTS: tl.constexpr = next_power_of_2(max(2, GROW.S))
    PLACES: tl.constexpr = next_power_of_2(max(STARTS, COUNT))
    request = tl.program_id(0).to(tl.int64)
    token = fields_ptr + request * GROW.C
    score_ptr += request * GROW.C
    started_ptr += request * (max(GROW.BLOCKS - 2, 1) * GROW.S)
    open_key = _attach_block(drafts, token, size, score_ptr, started_ptr, request, done, GROW)
    if GROW.STARTED > 0:
        path_hash, key = token + size, token + 2 * size
        may_start, scratch = token + 4 * size, token + 5 * size
        place = tl.arange(0, PLACES)
        inside = (place > 0) & (place < COUNT)
        _, candidate, rank, leader = by_text(key, path_hash, COUNT, PLACES, True)
        best = (leader == rank).to(tl.int64)
        at = tl.gather(candidate, rank, 0)
        tl.store(scratch + at, best, mask=rank < COUNT)
        tl.debug_barrier()
        text = tl.load(path_hash + place, mask=inside, other=0)
        free = tl.load(scratch + place, mask=inside, other=0) != 0
        for s in range(GROW.STARTED):
            free = free & (text != tl.load(started_ptr + s))
        # Too few candidates: the last one, closed, fills the starts.
        closed = tl.minimum(tl.maximum(place, 1), COUNT - 1).to(tl.int64) | CLOSED
        open_key = tl.load(may_start + place, mask=inside, other=0)
        open_key = tl.where(inside & free, open_key, closed)
    # Complemented: the largest are then the smallest keys, in ascending order.
    chosen = ~tl.topk(~open_key, STARTS)
    slot = tl.arange(0, STARTS)
    out = request * GROW.S + slot
    node = chosen & INDEX
    drafted = (node - 1) // GROW.B
    tl.store(starts.node + out, node, mask=slot < GROW.S)
    tl.store(starts.token + out, tl.load(token + node), mask=slot < GROW.S)
    tl.store(starts.row + out, drafted // GROW.K, mask=slot < GROW.S)
    tl.store(starts.position + out, drafted % GROW.K, mask=slot < GROW.S)
    tl.store(starts.valid + out, chosen < CLOSED, mask=slot < GROW.S)


@jit(do_not_specialize=["size", "done"])
def _attach_and_select_kernel(
    drafts,  # BlockDrafts
    fields_ptr,  # [6, R, C] int64
    score_ptr,  # [R, C] fp32
    started_ptr,  # [R, max(1, BLOCKS-2), S] int64
    tree,  # TreeTensors
    size,  # R · C
    done,  # drafted rows of earlier blocks
    GROW: tl.constexpr,  # BlockConstants
    JOINS: tl.constexpr,  # texts may be equal
    SELECT: tl.constexpr,  # SelectConstants
):
    """Attach the last block, and build the tree."""
    request = tl.program_id(0).to(tl.int64)
    token = fields_ptr + request * GROW.C
    path_hash, key, parent = token + size, token + 2 * size, token + 3 * size
    score_ptr += request * GROW.C
    _attach_block(drafts, token, size, score_ptr, started_ptr, request, done, GROW)
    select_part(token, parent, score_ptr, key, path_hash, tree, request, JOINS, SELECT)
