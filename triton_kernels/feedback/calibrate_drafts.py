"""Draft calibration (temperature scaling): update from verification results, and lookup.

The torch references are `DraftCalibration.learn` over `VerifiedTrees.of_drafter`, and
`DraftCalibration.of`. It is one program that learns: requests are few and their trees small, and a
second launch would cost more than what it could spread. The sums have one order, so the same
verdicts always teach the same.
"""

from __future__ import annotations

import math

import torch

from ..optional_triton import cdiv, jit, next_power_of_2, tl
from ..verify.verification_result import VerificationResult

_TILE = 2048  # nodes of several requests that the program looks at together
_REQUESTS = 128  # of a program that only says β


def update_calibration_triton(
    log: torch.Tensor,
    trees: torch.Tensor,
    drafter: int,
    result: VerificationResult,
    limits: tuple[float, float],
    prior: float,
    memory: float,
    own: torch.Tensor,
    own_trees: torch.Tensor,
    own_range: float,
    own_prior: float,
    own_memory: float,
) -> None:
    """Change `log`, `trees`, `own` and `own_trees` in place.

    Args:
        log, trees: [2] fp32, as `DraftCalibration` keeps them.
        drafter: 0 or 1, which bit of `result.origin` to look at.
        limits: what log stays within.
        prior, memory: trees that count before the first one, and at most.
        own, own_trees: [S] fp32, as `DraftCalibration` keeps them; empty: requests are not told
            apart.
        own_range: the largest factor that own may be the logarithm of.
        own_prior, own_memory: as prior and memory.
    """
    nodes = next_power_of_2(result.score.shape[1])
    told_apart = (own, own_trees) if len(own) else (None, None)
    _learn_kernel[(1,)](
        log,
        trees,
        *result.arguments(),
        *limits,
        prior,
        memory,
        *told_apart,
        math.log(own_range),
        own_prior,
        own_memory,
        BIT=1 << drafter,
        NODES=nodes,
        PLACES=next_power_of_2(result.path.shape[1]),
        BLOCK=max(1, _TILE // nodes),
        num_warps=4,
    )


def calibration_triton(
    log: torch.Tensor, temperature: torch.Tensor, own: torch.Tensor, req_idx: torch.Tensor | None
) -> torch.Tensor:
    """β of requests, [R] fp32.

    Args:
        log, own: [2] and [S] fp32, as `DraftCalibration` keeps them.
        temperature: [R] fp32.
        req_idx: [R] integers, may be a column of a table; None: `own` is not asked.
    """
    count = len(temperature)
    beta = torch.empty(count, dtype=torch.float32, device=log.device)
    if count:
        _calibration_kernel[(cdiv(count, _REQUESTS),)](
            log,
            temperature,
            temperature.stride(0),
            own,
            req_idx,
            0 if req_idx is None else req_idx.stride(0),
            beta,
            count,
            BLOCK=_REQUESTS,
            num_warps=1,
        )
    return beta


@jit(do_not_specialize=["num_requests"])
def _learn_kernel(
    log,  # [2] fp32
    trees,  # [2] fp32
    req_idx,  # [R]
    req_idx_stride,
    num_run,  # [R]
    run_stride,
    accepted,  # [R]
    accepted_stride,
    path,  # [R, path_len] int64
    path_stride,
    path_len,
    score,  # [S, num_nodes] fp32
    origin,  # [S, num_nodes] uint8
    temperatures,  # [S] fp32
    num_requests,  # R
    num_nodes,
    lowest,
    highest,
    prior,
    memory,
    own,  # [S] fp32; or None
    own_trees,  # [S] fp32; or None
    own_most,
    own_prior,
    own_memory,
    BIT: tl.constexpr,
    NODES: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node, place = tl.arange(0, NODES)[None, :], tl.arange(0, PLACES)[None, :]
    greedy, sampling = tl.exp(tl.load(log)), tl.exp(tl.load(log + 1))
    cold_pull, hot_pull, cold_trees, hot_trees = 0.0, 0.0, 0.0, 0.0
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < num_requests
        at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
        run = tl.load(num_run + request * run_stride, mask=there, other=0).to(tl.int32)[:, None]
        # A node that was run is one of the tree's: no more than N are scheduled.
        wanted = node < tl.minimum(run, num_nodes)
        by = tl.load(origin + at[:, None] * num_nodes + node, mask=wanted, other=0)
        mine = (by.to(tl.int32) & BIT) > 0
        logprob = tl.load(score + at[:, None] * num_nodes + node, mask=mine, other=float("-inf"))
        expected = tl.sum(tl.exp(logprob), 1)
        counts = tl.max(mine.to(tl.int32), 1) > 0

        end = tl.load(accepted + request * accepted_stride, mask=there, other=0)
        end = end.to(tl.int32)[:, None]
        on_path = (place > 0) & (place <= end) & (place < path_len)
        step = tl.load(path + request[:, None] * path_stride + place, mask=on_path, other=0)
        on_path = on_path & (step > 0) & (step <= run)
        by = tl.load(origin + at[:, None] * num_nodes + step - 1, mask=on_path, other=0)
        kept = tl.sum(((by.to(tl.int32) & BIT) > 0).to(tl.float32), 1)

        error = tl.where(counts, (kept - expected) / (1 + expected), 0.0)
        if own is not None:
            count = tl.minimum(tl.load(own_trees + at, mask=counts, other=0.0) + 1, own_memory)
            moved = tl.load(own + at, mask=counts, other=0.0) + error / (own_prior + count)
            tl.debug_barrier()  # every warp reads these, one writes them
            tl.store(own_trees + at, count, mask=counts)
            tl.store(own + at, tl.minimum(tl.maximum(moved, -own_most), own_most), mask=counts)
        is_greedy = greedy * tl.load(temperatures + at, mask=there, other=0.0) <= sampling
        cold_pull += tl.sum(tl.where(is_greedy, error, 0.0), 0)
        hot_pull += tl.sum(tl.where(is_greedy, 0.0, error), 0)
        cold_trees += tl.sum((counts & is_greedy).to(tl.float32), 0)
        hot_trees += tl.sum((counts & (is_greedy == 0)).to(tl.float32), 0)

    cold_count = tl.minimum(tl.load(trees) + cold_trees, memory)
    cold_log = tl.load(log) + cold_pull / (prior + cold_count)
    hot_count = tl.minimum(tl.load(trees + 1) + hot_trees, memory)
    hot_log = tl.load(log + 1) + hot_pull / (prior + hot_count)
    tl.debug_barrier()  # every warp reads these, one writes them
    tl.store(trees, cold_count)
    tl.store(log, tl.minimum(tl.maximum(cold_log, lowest), highest))
    tl.store(trees + 1, hot_count)
    tl.store(log + 1, tl.minimum(tl.maximum(hot_log, lowest), highest))


@jit(do_not_specialize=["temperature", "req_idx", "num_requests"])
def _calibration_kernel(
    log,  # [2] fp32
    temperature,  # [R] fp32
    temperature_stride,
    own,  # [S] fp32
    req_idx,  # [R]; or None
    req_idx_stride,
    beta,  # [R] fp32
    num_requests,  # R
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_requests
    temperatures = tl.load(temperature + request * temperature_stride, mask=inside, other=0.0)
    greedy, sampling = tl.exp(tl.load(log)), tl.exp(tl.load(log + 1))
    # At temperature 0 it is the greedy target's.
    sharp = tl.where(
        temperatures > 0, sampling / tl.where(temperatures > 0, temperatures, 1.0), greedy
    )
    sharp = tl.minimum(greedy, sharp)
    if req_idx is not None:
        at = tl.load(req_idx + request * req_idx_stride, mask=inside, other=0).to(tl.int64)
        sharp *= tl.exp(tl.load(own + at, mask=inside, other=0.0))
    tl.store(beta + request, sharp, mask=inside)
