"""Counts over the trees of a step, added to running totals in one launch.

The reference is in `engine/metrics/counters.py`. Programs add atomically: sums of integers
do not depend on the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import cdiv, jit, strides_of, tl
from ..verify.verification_result import VerificationResult, authors_of, requests_at_once


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
    count, nodes = len(result.req_idx), result.origin.shape[1]
    _count_step_kernel[(cdiv(count, requests_at_once(nodes)),)](
        total,
        result,
        strides_of(result),
        drafted,
        None if drafted is None else strides_of(drafted),
        count,
        NUM_NODES=nodes,
        PLACES=result.path.shape[1],
        DRAFTED=drafted is not None,
    )


@jit(do_not_specialize=["num_requests"])
def _count_step_kernel(
    total_ptr,  # [9 + 3 · drafters + 4] int64
    result,  # VerificationResult
    strides,  # VerificationResult, their strides
    drafted,  # Drafted; or None
    by_request,  # Drafted, their strides; or None
    num_requests,  # R
    NUM_NODES: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTED: tl.constexpr,  # Triton 3.6 does not compare a tuple with None
):
    BLOCK: tl.constexpr = requests_at_once(NUM_NODES)
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, by, kept = authors_of(result, strides, request, num_requests, NUM_NODES, PLACES)
    first = tl.arange(0, by.shape[1])[None, :] == 0
    for kind in tl.static_range(3):
        mine = by == kind + 1
        _add(total_ptr + 3 * kind, mine)
        _add(total_ptr + 3 * kind + 1, kept == kind + 1)
        _add(total_ptr + 3 * kind + 2, mine & first)
    if DRAFTED:
        total_ptr += 9
        there = request < num_requests
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
