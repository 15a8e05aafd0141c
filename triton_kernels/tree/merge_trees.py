"""Merge of two trees, with the drafters of each node, in one launch.

The torch reference is `vllm_specblock.combine.merge`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .candidate_keys import DEPTH_ONE, PATH_FACTOR, ROOT_HASH
from .select_tree import SelectConstants, TreeTensors, select_part, warps_for


def merge_trees_triton(
    first: Any, second: Any, joins: bool, budget: int, max_depth: int
) -> tuple[TreeTensors, torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `combine.merge`.

    first, second: `DraftTree`s. joins: equal texts become one node.

    Returns:
        the trees; origin [R, N] uint8; [R] bool, both drafters agree on the first token.
    """
    (num_requests, ours), theirs = first.token.shape, second.token.shape[1]
    count, device = 1 + ours + theirs, first.token.device
    fields = torch.empty(5, num_requests, count, dtype=torch.int64, device=device)
    score = torch.empty(num_requests, count, device=device)
    tree = TreeTensors.empty(num_requests, budget, fields[4])
    origin = torch.empty(num_requests, budget, dtype=torch.uint8, device=device)
    agreed = torch.empty(num_requests, dtype=torch.bool, device=device)
    _merge_kernel[(num_requests,)](
        TreeTensors.of(first),
        TreeTensors.of(second),
        fields,
        score,
        tree,
        origin,
        agreed,
        score.numel(),
        OURS=ours,
        THEIRS=theirs,
        JOINS=joins,
        SELECT=SelectConstants(count, budget, max_depth),
        num_warps=warps_for(count),
    )
    return tree, origin, agreed


@jit(do_not_specialize=["size"])
def _merge_kernel(
    first,  # TreeTensors of OURS nodes
    second,  # TreeTensors of THEIRS
    fields_ptr,  # [5, R, COUNT] int64: room for candidates
    score_ptr,  # [R, COUNT] fp32
    tree,  # TreeTensors
    origin_ptr,  # [R, BUDGET] uint8
    agreed_ptr,  # [R] bool
    size,  # R · COUNT
    OURS: tl.constexpr,
    THEIRS: tl.constexpr,
    JOINS: tl.constexpr,
    SELECT: tl.constexpr,  # SelectConstants
    ROOT: tl.constexpr = ROOT_HASH,
    DEPTH_ONE: tl.constexpr = DEPTH_ONE,
    FACTOR: tl.constexpr = PATH_FACTOR,
):
    """Merge one request's root, the nodes of its first tree, and those of its second."""
    PLACES: tl.constexpr = next_power_of_2(SELECT.COUNT)
    NODES: tl.constexpr = next_power_of_2(SELECT.BUDGET + 1)
    CLIMBS: tl.constexpr = max(0, SELECT.MAX_DEPTH - 1).bit_length()
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    inside = place < SELECT.COUNT
    ours = (place > 0) & (place <= OURS)
    theirs = (place > OURS) & inside
    at = request * OURS + place - 1
    at2 = request * THEIRS + place - 1 - OURS
    # One of the two masked loads is 0, so their sum is the other.
    word = tl.load(first.token + at, mask=ours, other=0)
    word += tl.load(second.token + at2, mask=theirs, other=0)
    deep = tl.load(first.depth + at, mask=ours, other=0)
    deep += tl.load(second.depth + at2, mask=theirs, other=0)
    total = tl.load(first.logprob + at, mask=ours, other=0.0)
    total += tl.load(second.logprob + at2, mask=theirs, other=0.0)
    above = tl.load(second.parent + at2, mask=theirs, other=0)
    above = tl.where(above > 0, above + OURS, 0)
    above += tl.maximum(tl.load(first.parent + at, mask=ours, other=0), 0)
    tie = deep.to(tl.int64) * DEPTH_ONE + place
    key = (tl.abs(total).to(tl.int32, bitcast=True).to(tl.int64) << 32) + tie

    to = fields_ptr + request * SELECT.COUNT
    to_parent, to_key, to_hash = to + size, to + 2 * size, to + 3 * size
    to_score = score_ptr + request * SELECT.COUNT
    tl.store(to + place, word, mask=inside)
    tl.store(to_parent + place, above.to(tl.int64), mask=inside)
    tl.store(to_key + place, key, mask=inside)
    tl.store(to_score + place, total, mask=inside)
    if JOINS:
        # By pointer doubling. The root's hash counts once per path, in its topmost node.
        factor = tl.full([PLACES], FACTOR, tl.int64)
        path = tl.where(place == 0, 0, word + tl.where(above == 0, ROOT, 0) * factor)
        jump = above
        for step in tl.static_range(CLIMBS):
            if step > 0:
                jump = tl.gather(jump, jump, 0)
                factor = factor * factor
            path += factor * tl.gather(path, jump, 0)
        tl.store(to_hash + place, tl.where(place == 0, ROOT, path), mask=inside)
    tl.debug_barrier()
    select_part(to, to_parent, to_score, to_key, to_hash, tree, request, JOINS=JOINS, SELECT=SELECT)

    # Several candidates may be one node: those of a drafter write the same value, the drafters in
    # turn.
    slot = tl.arange(0, NODES)
    origin_ptr += request * SELECT.BUDGET - 1  # node 1 is entry 0
    blank = (slot > 0) & (slot <= SELECT.BUDGET)
    tl.store(origin_ptr + slot, tl.full([NODES], 0, tl.uint8), mask=blank)
    became = tl.load(tree.node + request * SELECT.COUNT + place, mask=inside, other=0)
    kept = (total > float("-inf")) & (became > 0) & (became <= SELECT.BUDGET)
    tl.debug_barrier()
    tl.store(origin_ptr + became, tl.full([PLACES], 1, tl.uint8), mask=kept & ours)
    tl.debug_barrier()
    by = tl.load(origin_ptr + became, mask=kept & theirs, other=0)
    tl.debug_barrier()  # all threads must have read before one adds a bit
    tl.store(origin_ptr + became, by | 2, mask=kept & theirs)
    both = (tl.load(first.size + request) > 0) & (tl.load(second.size + request) > 0)
    same = tl.load(first.token + request * OURS) == tl.load(second.token + request * THEIRS)
    tl.store(agreed_ptr + request, both & same)
