"""Counts over the trees of a step, added to running totals in one launch.

The torch reference is in `engine/metrics/counters.py`. Programs add atomically: sums of integers
do not depend on the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import cdiv, jit, next_power_of_2, strides_of, tl
from ..verify.verification_result import VerificationResult

_TILE = 2048  # nodes of several requests that a program looks at


class Drafted(NamedTuple):
    """Drafts for R requests."""

    live: Any  # [R] bool or integers; other requests are skipped (mid-prompt, padding)
    second: Any  # [R] bool, the second drafter ran; None: there is none
    agreed: Any  # [R] bool, both drafters' trees begin with the same token; None likewise
    size: Any  # [R] int32, nodes of the first drafter's tree
    beta: Any  # [R] fp32, β that it was grown with; None: 1
    other_size: Any = None  # as `size` and `beta`, of the second drafter
    other_beta: Any = None


def count_step_triton(
    total: torch.Tensor, result: VerificationResult, drafted: Drafted | None = None
) -> None:
    """Launch the kernel; see `DrafterCounters.count`."""
    count, nodes, places = len(result.req_idx), result.origin.shape[1], result.path.shape[1]
    block = max(1, _TILE // next_power_of_2(nodes))
    if count:
        _count_step_kernel[(cdiv(count, block),)](
            total,
            result,
            strides_of(result),
            drafted,
            None if drafted is None else strides_of(drafted),
            count,
            DRAFTED=drafted is not None,  # Triton before 3.7 cannot ask a tuple with a None in it
            NUM_NODES=nodes,
            NODES=next_power_of_2(nodes),
            PATH_LEN=places,
            PLACES=next_power_of_2(places),
            BLOCK=block,
            num_warps=4,
        )


@jit(do_not_specialize=["num_requests"])
def _count_step_kernel(
    total_ptr,  # [9 + 3 · drafters + 4] int64
    result,  # VerificationResult
    strides,  # VerificationResult, their strides
    drafted,  # Drafted; or None
    by_request,  # Drafted, their strides; or None
    num_requests,  # R
    DRAFTED: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    PATH_LEN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = request < num_requests
    at = tl.load(result.req_idx + request * strides.req_idx, mask=there, other=0).to(tl.int64)
    run = tl.load(result.num_run + request * strides.num_run, mask=there, other=0)
    run = tl.minimum(run, NUM_NODES)[:, None]
    tree = result.origin + (at * NUM_NODES)[:, None]
    node, place = tl.arange(0, NODES)[None, :], tl.arange(0, PLACES)[None, :]
    by = tl.load(tree + node, mask=node < run, other=0)
    # The root, 0, also fills the path beyond its end.
    path = result.path + (request * strides.path)[:, None] + place
    step = tl.load(path, mask=there[:, None] & (place < PATH_LEN), other=0)
    kept = tl.load(tree + step - 1, mask=(step > 0) & (step <= run), other=0)
    for kind in tl.static_range(3):
        mine = by == kind + 1
        _add(total_ptr + 3 * kind, mine)
        _add(total_ptr + 3 * kind + 1, kept == kind + 1)
        _add(total_ptr + 3 * kind + 2, mine & (node == 0))
    if DRAFTED:
        total_ptr += 9
        live = tl.load(drafted.live + request * by_request.live, mask=there, other=0)
        there = there & (live != 0)
        TWO: tl.constexpr = 0 if drafted.other_size is None else 1
        size = drafted.size + request * by_request.size
        at = request * by_request.beta
        both = _count_tree(total_ptr, size, drafted.beta, at, there, TWO)
        if TWO:
            size = drafted.other_size + request * by_request.other_size
            at = request * by_request.other_beta
            both = both & _count_tree(total_ptr + 1, size, drafted.other_beta, at, there, TWO)
            asked = tl.load(drafted.second + request * by_request.second, mask=there, other=0)
            _add(total_ptr + 2, asked != 0)
            same = tl.load(drafted.agreed + request * by_request.agreed, mask=there, other=0)
            _add(total_ptr + 3, same != 0)
        _add(total_ptr + 4 + 2 * TWO, both)
        _add(total_ptr + 5 + 2 * TWO, there)


@jit
def _count_tree(to_ptr, size_ptr, beta_ptr, at, there, TWO: tl.constexpr):
    """Count one drafter's nodes, trees and thousandths of β; returns where it has a tree."""
    size = tl.load(size_ptr, mask=there, other=0)
    _add(to_ptr, size)
    _add(to_ptr + 3 + TWO, size > 0)
    beta = 1.0
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + at, mask=there, other=0.0)
    _add(to_ptr + 6 + 2 * TWO, tl.where(size > 0, beta * 1000 + 0.5, 0.0))
    return size > 0


@jit
def _add(to_ptr, values):
    tl.atomic_add(to_ptr, tl.sum(values.to(tl.int32)).to(tl.int64), sem="relaxed")
