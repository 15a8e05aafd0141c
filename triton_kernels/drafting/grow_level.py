"""EAGLE-2's tree growth, one launch per level of the drafter, one program per request.

The torch reference is `vllm_specblock.drafters.eagle3.growth.Levels`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..tree.candidate_keys import CLOSED, DEPTH_ONE, INDEX_BITS
from ..tree.select_tree import TreeTensors, select_constants, select_part, warps_for


@dataclass(frozen=True)
class LevelLimits:
    """Sizes of a growth: levels, children of a row, rows of level 2 and later, and N."""

    depth: int
    top_k: int
    width: int
    budget: int

    @property
    def candidates(self) -> int:
        """C, the root included."""
        return 1 + (1 + (self.depth - 1) * self.width) * self.top_k


class GrowingLevels:
    """Shared tensors of one growth's launches.

    Attributes:
        fields: [4, R, C] int64: token, parent, key, node in the tree.
        score: [R, C] fp32.
        level: the newest.

    Args:
        position: [R] int64, RoPE position of the rows of level 1.
    """

    def __init__(self, limits: LevelLimits, position: torch.Tensor) -> None:
        self.limits, self.position, self.level = limits, position, 0
        shape, device = (len(position), limits.candidates), position.device
        self.fields = torch.empty(4, *shape, dtype=torch.int64, device=device)
        self.score = torch.empty(shape, dtype=torch.float32, device=device)

    def attach(
        self,
        rows: NextRows | None,
        there: torch.Tensor | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
    ) -> NextRows | TreeTensors:
        """Hang a level under the rows that drafted it; return the next rows, or at last the trees.

        Args:
            rows: what the last call returned; None in level 1, which hangs from the root.
            there: [R, rows] bool, rows that had a slot in the cache; None: all.
            logprob: [R, rows, k] fp32, best first; 1 row in level 1, then `width`.
            token: [R, rows, k] int64, target vocabulary.
        """
        limits, device, requests = self.limits, self.score.device, len(self.score)
        self.level += 1
        root, last = rows is None, self.level == limits.depth
        count = 1 if root else limits.width
        done = 0 if root else 1 + (self.level - 2) * limits.width  # rows before this level's
        # Level 1 reads no rows.
        node, valid = (self.fields,) * 2 if rows is None else (rows.node, rows.valid)
        drafts = LevelDrafts(
            logprob.contiguous(),
            token.contiguous(),
            node.contiguous(),
            valid.contiguous(),
            None if there is None else there.contiguous(),
        )
        constants = LevelConstants(
            ROOT=root,
            ROWS=count,
            TOP_K=limits.top_k,
            C=limits.candidates,
            CELLS=max(2, next_power_of_2(count * limits.top_k)),
        )
        kept, numbers = (self.fields, self.score), (self.score.numel(), self.level, done)
        if last:
            tree = TreeTensors.empty(requests, limits.budget, self.fields[3])
            select = select_constants(limits.candidates, limits.budget, limits.depth)
            if requests:
                _attach_and_select_kernel[(requests,)](
                    drafts,
                    *kept,
                    tree,
                    *numbers,
                    constants,
                    select,
                    num_warps=warps_for(limits.candidates),
                )
            return tree
        grown = NextRows.empty(requests, limits.width, device)
        if requests:
            _attach_and_grow_kernel[(requests,)](
                drafts,
                *kept,
                self.position,
                self.position.stride(0),
                grown,
                *numbers,
                constants,
                WIDTH=limits.width,
                # A top-k of 1 does not compile with Triton 3.6.
                GROWN=max(2, next_power_of_2(limits.width)),
                num_warps=1 if count * limits.top_k <= 128 else 4,
            )
        return grown


class LevelDrafts(NamedTuple):
    """A level's tokens and parent rows."""

    logprob: torch.Tensor  # [R, ROWS, TOP_K] fp32
    token: torch.Tensor  # [R, ROWS, TOP_K] int64
    node: torch.Tensor  # [R, ROWS] int64; not read of level 1, as the next two
    valid: torch.Tensor  # [R, ROWS] bool
    there: torch.Tensor | None  # [R, ROWS] bool


class NextRows(NamedTuple):
    """What grows next: as `NextStarts` [R, width] each, and what the drafter needs to run it."""

    node: torch.Tensor  # int64, as all but `valid`
    token: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor  # 0
    valid: torch.Tensor  # bool
    behind: torch.Tensor  # [R · width], of the last forward's rows the one that each follows
    rope: torch.Tensor  # [R · width], its RoPE position

    @classmethod
    def empty(cls, requests: int, width: int, device: torch.device) -> NextRows:
        """Nothing is written yet."""
        grown: tuple[int, ...] = (requests, width)
        flat: tuple[int, ...] = (requests * width,)
        shapes = [grown] * 5 + [flat] * 2
        dtypes = [torch.int64] * 4 + [torch.bool] + [torch.int64] * 2
        return cls._make(
            [torch.empty(shape, dtype=x, device=device) for shape, x in zip(shapes, dtypes)]
        )


class LevelConstants(NamedTuple):
    """Compile-time constants."""

    ROOT: bool  # level 1
    ROWS: int
    TOP_K: int
    C: int  # candidates of a request
    CELLS: int  # >= ROWS · TOP_K


@jit
def _attach_level(
    drafts,  # LevelDrafts
    request,  # int64
    fields_ptr,  # [.., C], one request's candidates, as the next
    score_ptr,  # [C]
    size,  # from field to field
    level,
    first_cell,
    GROW: tl.constexpr,  # LevelConstants
    DEPTH_ONE: tl.constexpr = DEPTH_ONE,
):
    """Write a level's candidates from `first_cell` on; return their keys."""
    first_row = request * GROW.ROWS
    cell = tl.arange(0, GROW.CELLS)
    inside = cell < GROW.ROWS * GROW.TOP_K
    if GROW.ROOT:
        for field in tl.static_range(3):
            tl.store(fields_ptr + field * size, 0)
        tl.store(score_ptr, 0.0)
        above = tl.full([GROW.CELLS], 0, tl.int64)
        total = tl.full([GROW.CELLS], 0.0, tl.float32)
    else:
        row = cell // GROW.TOP_K
        above = tl.load(drafts.node + first_row + row, mask=inside, other=0)
        grows = tl.load(drafts.valid + first_row + row, mask=inside, other=0) != 0
        if drafts.there is not None:
            grows = grows & (tl.load(drafts.there + first_row + row, mask=inside, other=0) != 0)
        total = tl.where(grows, tl.load(score_ptr + above, mask=inside, other=0.0), float("-inf"))
    gain = tl.load(drafts.logprob + first_row * GROW.TOP_K + cell, mask=inside, other=0.0)
    # Rounding may leave a certain token's log-probability above 0.
    total += tl.minimum(gain, 0.0)
    index = first_cell + cell
    tie = level.to(tl.int64) * DEPTH_ONE + index
    key = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie
    own = tl.load(drafts.token + first_row * GROW.TOP_K + cell, mask=inside, other=0)
    tl.store(fields_ptr + index, own, mask=inside)
    tl.store(fields_ptr + size + index, above, mask=inside)
    tl.store(fields_ptr + 2 * size + index, key, mask=inside)
    tl.store(score_ptr + index, total, mask=inside)
    return key


@jit(do_not_specialize=["position_ptr", "size", "level", "done"])
def _attach_and_grow_kernel(
    drafts,  # LevelDrafts
    fields_ptr,  # [4, R, C] int64
    score_ptr,  # [R, C] fp32
    position_ptr,  # [R]
    position_stride,
    grown,  # NextRows
    size,  # R · C
    level,
    done,  # rows before this level's
    GROW: tl.constexpr,  # LevelConstants
    WIDTH: tl.constexpr,
    GROWN: tl.constexpr,  # >= WIDTH
    CLOSED: tl.constexpr = CLOSED,
    INDEX: tl.constexpr = INDEX_BITS,
):
    """Attach a level, and choose its WIDTH best nodes, which grow next."""
    request = tl.program_id(0).to(tl.int64)
    first_cell = 1 + done * GROW.TOP_K
    key = _attach_level(
        drafts,
        request,
        fields_ptr + request * GROW.C,
        score_ptr + request * GROW.C,
        size,
        level,
        first_cell,
        GROW,
    )
    key = tl.where(tl.arange(0, GROW.CELLS) < GROW.ROWS * GROW.TOP_K, key, 0x7FFFFFFFFFFFFFFF)
    # Complemented: the largest are then the smallest keys, in ascending order.
    chosen = ~tl.topk(~key, GROWN)
    slot = tl.arange(0, GROWN)
    stored = slot < WIDTH
    out = request * WIDTH + slot
    cell = (chosen & INDEX) - first_cell
    row = cell // GROW.TOP_K
    token = drafts.token + request * (GROW.ROWS * GROW.TOP_K)
    tl.store(grown.node + out, chosen & INDEX, mask=stored)
    tl.store(grown.token + out, tl.load(token + cell, mask=stored, other=0), mask=stored)
    tl.store(grown.row + out, done + row, mask=stored)
    tl.store(grown.position + out, tl.full([GROWN], 0, tl.int64), mask=stored)
    tl.store(grown.valid + out, chosen < CLOSED, mask=stored)
    tl.store(grown.behind + out, request * GROW.ROWS + row, mask=stored)
    at = tl.load(position_ptr + request * position_stride).to(tl.int64) + level
    tl.store(grown.rope + out, tl.full([GROWN], 0, tl.int64) + at, mask=stored)


@jit(do_not_specialize=["size", "level", "done"])
def _attach_and_select_kernel(
    drafts,  # LevelDrafts
    fields_ptr,  # [4, R, C] int64
    score_ptr,  # [R, C] fp32
    tree,  # TreeTensors
    size,  # R · C
    level,
    done,  # rows before this level's
    GROW: tl.constexpr,  # LevelConstants
    SELECT: tl.constexpr,  # SelectConstants
):
    """Attach the last level, and build the tree."""
    request = tl.program_id(0).to(tl.int64)
    fields_ptr += request * GROW.C
    score_ptr += request * GROW.C
    _attach_level(drafts, request, fields_ptr, score_ptr, size, level, 1 + done * GROW.TOP_K, GROW)
    tl.debug_barrier()
    parent, key = fields_ptr + size, fields_ptr + 2 * size
    # No two texts are equal: children of one node are different tokens.
    select_part(fields_ptr, parent, score_ptr, key, key, tree, request, JOINS=False, SELECT=SELECT)
