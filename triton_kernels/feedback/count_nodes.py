"""Counts over the trees of a step, added to running totals: one launch for what was verified, one
for what was drafted.

The torch references are in `engine/metrics/counters.py`. Programs add to the totals as they come:
integers have the same sum in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..optional_triton import cdiv, jit, next_power_of_2, tl
from ..verify.verification_result import VerificationResult

_TILE = 2048  # nodes of several requests that a program looks at
_REQUESTS = 256  # of a program that looks at no nodes


def count_verified_triton(total: torch.Tensor, result: VerificationResult) -> None:
    """Launch the kernel.

    Args:
        total: [3, 3] int64, by origin: verified, accepted, first of a tree; added to.
    """
    req_idx, run, path, origin = result.req_idx, result.num_run, result.path, result.origin
    count, nodes, places = len(req_idx), origin.shape[1], path.shape[1]
    block = max(1, _TILE // next_power_of_2(nodes))
    if count:
        _verified_kernel[(cdiv(count, block),)](
            total,
            origin,
            origin.stride(0),
            req_idx,
            req_idx.stride(0),
            run,
            run.stride(0),
            path,
            path.stride(0),
            count,
            nodes,
            places,
            NODES=next_power_of_2(nodes),
            PLACES=next_power_of_2(places),
            BLOCK=block,
        )


def count_drafted_triton(
    total: torch.Tensor,
    sizes: Sequence[torch.Tensor],
    second: torch.Tensor | None,
    agreed: torch.Tensor | None,
    live: torch.Tensor,
    betas: Sequence[torch.Tensor | None],
) -> None:
    """Launch the kernel; arguments as in `DrafterCounters.drafted`.

    Args:
        total: [3 · heads + 4] int64: nodes per drafter, second, agreed, trees per drafter, both,
            live, thousandths of β per drafter; added to.
    """
    count, first, other = len(live), sizes[0], sizes[-1]
    given = (second, agreed, betas[0], betas[-1])
    strides = [0 if x is None else x.stride(0) for x in given]
    if count:
        _drafted_kernel[(cdiv(count, _REQUESTS),)](
            total,
            first,
            first.stride(0),
            other,
            other.stride(0),
            second,
            strides[0],
            agreed,
            strides[1],
            live,
            live.stride(0),
            betas[0],
            strides[2],
            betas[-1],
            strides[3],
            count,
            HEADS=len(sizes),
            BLOCK=_REQUESTS,
        )


@jit(do_not_specialize=["num_requests"])
def _verified_kernel(
    total,  # [3, 3] int64
    origin,  # [S, num_nodes] uint8
    origin_stride,
    req_idx,  # [R] integers
    req_idx_stride,
    num_run,  # [R] integers
    run_stride,
    path,  # [R, path_len] int64
    path_stride,
    num_requests,  # R
    num_nodes,
    path_len,
    NODES: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = request < num_requests
    run = tl.load(num_run + request * run_stride, mask=there, other=0)
    run = tl.minimum(run, num_nodes)[:, None]
    at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
    tree = origin + (at * origin_stride)[:, None]

    node = tl.arange(0, NODES)[None, :]
    by = tl.load(tree + node, mask=node < run, other=0)
    # The root, 0, also stands for what lies beyond the path's end.
    place = tl.arange(0, PLACES)[None, :]
    at = path + (request * path_stride)[:, None] + place
    step = tl.load(at, mask=there[:, None] & (place < path_len), other=0)
    kept = tl.load(tree + step - 1, mask=(step > 0) & (step <= run), other=0)
    for kind in tl.static_range(1, 4):
        row = total + (kind - 1) * 3
        mine = (by == kind).to(tl.int32)
        _add(row, tl.sum(tl.sum(mine, 1), 0))
        _add(row + 1, tl.sum(tl.sum((kept == kind).to(tl.int32), 1), 0))
        _add(row + 2, tl.sum(tl.sum(tl.where(node == 0, mine, 0), 1), 0))


@jit(do_not_specialize=["num_requests"])
def _drafted_kernel(
    total,  # [3 * HEADS + 4] int64
    first,  # [R] int32, tree sizes; the same one if HEADS is 1
    first_stride,
    other,  # [R] int32, tree sizes; the same one if HEADS is 1
    other_stride,
    second,  # [R] bool; None: there is no second drafter
    second_stride,
    agreed,  # [R] bool; None: there is no second drafter
    agreed_stride,
    live,  # [R] bool
    live_stride,
    first_beta,  # [R] fp32; None: 1
    first_beta_stride,
    other_beta,  # [R] fp32, the same one if HEADS is 1; None: 1
    other_beta_stride,
    num_requests,  # R
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = request < num_requests
    there = there & (tl.load(live + request * live_stride, mask=there, other=0) != 0)
    size = tl.load(first + request * first_stride, mask=there, other=0)
    _add(total, tl.sum(size, 0))
    trees, thousandths = total + HEADS + 2, total + 2 * HEADS + 4
    both = size > 0
    _add(trees, tl.sum(both.to(tl.int32), 0))
    _add(thousandths, _thousandths(first_beta, request * first_beta_stride, both))
    if HEADS == 2:
        size = tl.load(other + request * other_stride, mask=there, other=0)
        _add(total + 1, tl.sum(size, 0))
        _add(trees + 1, tl.sum((size > 0).to(tl.int32), 0))
        beta = _thousandths(other_beta, request * other_beta_stride, size > 0)
        _add(thousandths + 1, beta)
        both = both & (size > 0)
    if second is not None:
        asked = tl.load(second + request * second_stride, mask=there, other=0) != 0
        _add(total + HEADS, tl.sum(asked.to(tl.int32), 0))
        same = tl.load(agreed + request * agreed_stride, mask=there, other=0) != 0
        _add(total + HEADS + 1, tl.sum(same.to(tl.int32), 0))
    _add(trees + HEADS, tl.sum(both.to(tl.int32), 0))
    _add(trees + HEADS + 1, tl.sum(there.to(tl.int32), 0))


@jit
def _thousandths(beta, at, drafted):
    """Their sum where something was drafted."""
    if beta is None:
        each = drafted.to(tl.int32) * 1000
    else:
        each = (tl.load(beta + at, mask=drafted, other=0.0) * 1000 + 0.5).to(tl.int32)
    return tl.sum(each, 0)


@jit
def _add(to, count):
    tl.atomic_add(to, count.to(tl.int64), sem="relaxed")
