"""Draft calibration (temperature scaling): update from verification results.

The torch reference is `DraftCalibration.learn` over `VerifiedTrees.of_drafter`. One program sums in
a fixed order, so equal results give equal calibration.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, strides_of, tl
from ..verify.verification_result import VerificationResult, authors_of, requests_at_once


class LearnRates(NamedTuple):
    """Learning rates and bounds of a calibration."""

    lowest: float  # bounds of log β, or of log(β · temperature)
    highest: float
    prior: float  # trees that count before the first one
    memory: float  # trees that count at most
    own_most: float  # bound of a request's own factor, in either direction, as a log
    own_prior: float  # as `prior` and `memory`, of one request
    own_memory: float


def update_calibration_triton(
    log: torch.Tensor,
    trees: torch.Tensor,
    own: torch.Tensor,
    own_trees: torch.Tensor,
    drafter: int,
    result: VerificationResult,
    rates: LearnRates,
) -> torch.Tensor:
    """Update `log`, `trees`, `own` and `own_trees` in place; return β of the requests, [R] fp32.

    Args:
        log, trees: [2] fp32, see `DraftCalibration`.
        own, own_trees: [S] fp32, likewise; empty: requests share one calibration.
        drafter: 0 or 1, the bit of `result.origin`.
    """
    beta = log.new_empty(len(result.req_idx))
    _learn_kernel[(1,)](
        log,
        trees,
        own if len(own) else None,
        own_trees if len(own) else None,
        beta,
        result,
        strides_of(result),
        rates,
        len(result.req_idx),
        BIT=1 << drafter,
        NUM_NODES=result.score.shape[1],
        PLACES=result.path.shape[1],
    )
    return beta


@jit(do_not_specialize=["num_requests"])
def _learn_kernel(
    log_ptr,  # [2] fp32
    trees_ptr,  # [2] fp32
    own_ptr,  # [S] fp32; or None
    own_trees_ptr,  # [S] fp32; or None
    beta_ptr,  # [R] fp32
    result,  # VerificationResult
    strides,  # VerificationResult, their strides
    rates,  # LearnRates
    num_requests,  # R
    BIT: tl.constexpr,
    NUM_NODES: tl.constexpr,
    PLACES: tl.constexpr,
):
    BLOCK: tl.constexpr = requests_at_once(NUM_NODES)
    greedy, sampling = tl.exp(tl.load(log_ptr)), tl.exp(tl.load(log_ptr + 1))
    kind = tl.arange(0, 2)  # of requests: greedy, and sampling
    pull, learned = tl.zeros([2], tl.float32), tl.zeros([2], tl.float32)
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        at, by, on_path = authors_of(result, strides, request, num_requests, NUM_NODES, PLACES)
        mine = (by.to(tl.int32) & BIT) > 0
        node = tl.arange(0, by.shape[1])[None, :]
        score = result.score + (at * NUM_NODES)[:, None] + node
        expected = tl.sum(tl.exp(tl.load(score, mask=mine, other=float("-inf"))), 1)
        counts = tl.max(mine.to(tl.int32), 1) > 0
        kept = tl.sum(((on_path.to(tl.int32) & BIT) > 0).to(tl.float32), 1)

        error = tl.where(counts, (kept - expected) / (1 + expected), 0.0)
        if own_ptr is not None:
            count = tl.load(own_trees_ptr + at, mask=counts, other=0.0) + 1
            count = tl.minimum(count, rates.own_memory)
            moved = tl.load(own_ptr + at, mask=counts, other=0.0)
            moved += error / (rates.own_prior + count)
            moved = tl.minimum(tl.maximum(moved, -rates.own_most), rates.own_most)
            tl.debug_barrier()  # every warp reads these, one writes them
            tl.store(own_trees_ptr + at, count, mask=counts)
            tl.store(own_ptr + at, moved, mask=counts)
        is_greedy = greedy * tl.load(result.temperatures + at, mask=counts, other=0.0) <= sampling
        decides = counts[:, None] & (is_greedy[:, None] == (kind == 0)[None, :])
        pull += tl.sum(tl.where(decides, error[:, None], 0.0), 0)
        learned += tl.sum(decides.to(tl.float32), 0)

    trees = tl.minimum(tl.load(trees_ptr + kind) + learned, rates.memory)
    log = tl.load(log_ptr + kind) + pull / (rates.prior + trees)
    log = tl.minimum(tl.maximum(log, rates.lowest), rates.highest)
    tl.debug_barrier()  # every warp reads these, one writes them; `own` is written
    tl.store(trees_ptr + kind, trees)
    tl.store(log_ptr + kind, log)
    greedy = tl.exp(tl.sum(tl.where(kind == 0, log, 0.0), 0))
    sampling = tl.exp(tl.sum(tl.where(kind == 1, log, 0.0), 0))
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < num_requests
        at = tl.load(result.req_idx + request * strides.req_idx, mask=there, other=0).to(tl.int64)
        # Temperature 0, or one so low that β would exceed the greedy β.
        heat = tl.load(result.temperatures + at, mask=there, other=0.0)
        beta = tl.minimum(greedy, sampling / tl.maximum(heat, 1e-30))
        if own_ptr is not None:
            beta *= tl.exp(tl.load(own_ptr + at, mask=there, other=0.0))
        tl.store(beta_ptr + request, beta, mask=there)
