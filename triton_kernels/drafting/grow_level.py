"""EAGLE-2's tree growth, one launch per level of the drafter, one program per request.

A launch hangs a level's tokens under the nodes whose rows said them, and then either chooses what
grows next or, after the last level, makes the tree (`select_tree.py`). The torch reference is
`vllm_specblock.drafters.eagle3.growth.Levels`, bit for bit: of equal scores the earlier candidate
comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """What the launches of one growth share.

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

    def attach_level(
        self,
        node: torch.Tensor | None,
        valid: torch.Tensor | None,
        there: torch.Tensor | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
    ) -> tuple[torch.Tensor, ...] | TreeTensors:
        """Hang the next level, and go on.

        Args:
            node: [R, rows] int64, the candidates that it hangs from; None in level 1.
            valid: [R, rows] bool, which of them are real; None in level 1.
            there: [R, rows] bool, which had a place; None: all.
            logprob: [R, rows, k] fp32, best first; 1 row in level 1, then `width`.
            token: [R, rows, k] int64, target vocabulary.

        Returns:
            before the last level what grows next, as `LevelRows` has it, and after it the tree.
        """
        limits, device, requests = self.limits, self.score.device, len(self.score)
        self.level += 1
        root, last = self.level == 1, self.level == limits.depth
        rows = 1 if root else limits.width
        done = 0 if root else 1 + (self.level - 2) * limits.width  # rows before this level's
        if root:
            node = valid = self.fields  # not read
        assert node is not None and valid is not None
        if last:
            tree = TreeTensors.empty(requests, limits.budget, self.fields[3])
            result, kernel = [*tree.all()], _attach_and_select_kernel
            warps = warps_for(limits.candidates)
            more = select_constants(limits.candidates, limits.budget, limits.depth)
        else:

            def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device=device)

            grown = (requests, limits.width)
            result = [empty(*grown) for _ in range(4)]
            result.append(empty(*grown, dtype=torch.bool))
            result += [empty(requests * limits.width) for _ in range(2)]
            kernel, warps = _attach_and_grow_kernel, 1 if rows * limits.top_k <= 128 else 4
            # A top-k of 1 does not compile with Triton 3.6.
            more = {"WIDTH": limits.width, "GROWN": max(2, next_power_of_2(limits.width)),
                    "CLOSED": CLOSED, "INDEX": INDEX_BITS}  # fmt: skip
        if requests:
            kernel[(requests,)](
                logprob.contiguous(), token.contiguous(), node.contiguous(), valid.contiguous(),
                None if there is None else there.contiguous(), self.fields, self.score,
                self.position, self.position.stride(0), *result, self.score.numel(), self.level,
                done, ROOT=root, ROWS=rows, TOP_K=limits.top_k, C=limits.candidates,
                CELLS=max(2, next_power_of_2(rows * limits.top_k)), DEPTH_ONE=DEPTH_ONE, **more,
                num_warps=warps,
            )  # fmt: skip
        return tree if last else tuple(result)


@jit
def _attach_level(
    logprob, token, node, valid, there,  # one request's rows
    fields, score,  # one request's candidates
    size, level, first_cell,
    ROOT: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, CELLS: tl.constexpr,
    DEPTH_ONE: tl.constexpr,
):  # fmt: skip
    """Write a level's candidates, the first of which is `first_cell`; returns their keys."""
    cell = tl.arange(0, CELLS)
    inside = cell < ROWS * TOP_K
    if ROOT:
        for field in tl.static_range(3):
            tl.store(fields + field * size, 0)
        tl.store(score, 0.0)
        above = tl.full([CELLS], 0, tl.int64)
        total = tl.full([CELLS], 0.0, tl.float32)
    else:
        row = cell // TOP_K
        above = tl.load(node + row, mask=inside, other=0)
        grows = tl.load(valid + row, mask=inside, other=0) != 0
        if there is not None:
            grows = grows & (tl.load(there + row, mask=inside, other=0) != 0)
        total = tl.where(grows, tl.load(score + above, mask=inside, other=0.0), float("-inf"))
    # Rounding may leave a certain token's log-probability above 0.
    total += tl.minimum(tl.load(logprob + cell, mask=inside, other=0.0), 0.0)
    index = first_cell + cell
    tie = level.to(tl.int64) * DEPTH_ONE + index
    key = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie
    tl.store(fields + index, tl.load(token + cell, mask=inside, other=0), mask=inside)
    tl.store(fields + size + index, above, mask=inside)
    tl.store(fields + 2 * size + index, key, mask=inside)
    tl.store(score + index, total, mask=inside)
    return key


@jit(do_not_specialize=["position", "size", "level", "done"])
def _attach_and_grow_kernel(
    logprob, token,  # [R, ROWS, TOP_K]
    node, valid, there,  # [R, ROWS]
    fields,  # [4, R, C]
    score,  # [R, C]
    position,  # [R]
    position_stride,
    out_node, out_token, out_row, out_position, out_valid, out_behind, out_rope,  # [R, WIDTH]
    size,  # R · C
    level,
    done,  # rows before this level's
    ROOT: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, C: tl.constexpr,
    CELLS: tl.constexpr, DEPTH_ONE: tl.constexpr, WIDTH: tl.constexpr, GROWN: tl.constexpr,
    CLOSED: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Hang a level, and choose the WIDTH best of its nodes, which grow next."""
    request = tl.program_id(0).to(tl.int64)
    token += request * (ROWS * TOP_K)
    first_cell = 1 + done * TOP_K
    if there is not None:
        there += request * ROWS
    key = _attach_level(
        logprob + request * (ROWS * TOP_K), token, node + request * ROWS, valid + request * ROWS,
        there, fields + request * C, score + request * C, size, level, first_cell,
        ROOT, ROWS, TOP_K, CELLS, DEPTH_ONE,
    )  # fmt: skip
    key = tl.where(tl.arange(0, CELLS) < ROWS * TOP_K, key, 0x7FFFFFFFFFFFFFFF)
    # Complemented: the largest are then the smallest keys, in ascending order.
    chosen = ~tl.topk(~key, GROWN)
    slot = tl.arange(0, GROWN)
    stored = slot < WIDTH
    out = request * WIDTH + slot
    cell = (chosen & INDEX) - first_cell
    row = cell // TOP_K
    tl.store(out_node + out, chosen & INDEX, mask=stored)
    tl.store(out_token + out, tl.load(token + cell, mask=stored, other=0), mask=stored)
    tl.store(out_row + out, done + row, mask=stored)
    tl.store(out_position + out, tl.full([GROWN], 0, tl.int64), mask=stored)
    tl.store(out_valid + out, chosen < CLOSED, mask=stored)
    tl.store(out_behind + out, request * ROWS + row, mask=stored)
    at = tl.load(position + request * position_stride).to(tl.int64) + level
    tl.store(out_rope + out, tl.full([GROWN], 0, tl.int64) + at, mask=stored)


@jit(do_not_specialize=["position", "size", "level", "done"])
def _attach_and_select_kernel(
    logprob, token,  # [R, ROWS, TOP_K]
    node, valid, there,  # [R, ROWS]
    fields,  # [4, R, C]
    score,  # [R, C]
    position, position_stride,  # not read
    tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, of_candidate,
    size,  # R · C
    level,
    done,  # rows before this level's
    ROOT: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, C: tl.constexpr,
    CELLS: tl.constexpr, DEPTH_ONE: tl.constexpr,
    COUNT: tl.constexpr, PLACES: tl.constexpr, BUDGET: tl.constexpr, NODES: tl.constexpr,
    W: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr, CLOSED: tl.constexpr,
    INDEX: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Hang the last level, and make the tree."""
    request = tl.program_id(0).to(tl.int64)
    fields += request * C
    score += request * C
    if there is not None:
        there += request * ROWS
    _attach_level(
        logprob + request * (ROWS * TOP_K), token + request * (ROWS * TOP_K),
        node + request * ROWS, valid + request * ROWS, there, fields, score, size, level,
        1 + done * TOP_K, ROOT, ROWS, TOP_K, CELLS, DEPTH_ONE,
    )  # fmt: skip
    tl.debug_barrier()
    parent, key = fields + size, fields + 2 * size
    # No two texts are equal: children of one node are different tokens.
    select_part(
        fields, parent, score, key, key,
        tree_token, tree_parent, tree_depth, tree_logprob, tree_size, ancestors, of_candidate,
        request, False, COUNT, PLACES, BUDGET, NODES, W, WORDS, STEPS, CLOSED, INDEX, FACTOR,
    )  # fmt: skip
