"""Acceptance estimator update from verification results.

The torch reference is `AcceptanceEstimator.learn` over what `VerifiedTrees` works out. It is one
program that learns: requests are few and their trees small, and a second launch would cost more
than what it could spread. What it sums are whole numbers, so the same verdicts always teach the
same.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..verify.verification_result import VerificationResult

# Nodes, or places of paths, of several requests that the program looks at together. As many as it
# has threads or more: a histogram of fewer would lean on how the compiler spreads them.
_TILE = 2048


def update_acceptance_triton(
    judged: torch.Tensor,
    reached: torch.Tensor,
    result: VerificationResult,
    bins_per_nat: int,
    decay: float,
) -> None:
    """Change `judged` and `reached` in place.

    Args:
        judged, reached: [2, bins] fp32, as `AcceptanceEstimator` keeps them; bins a power of two.
        bins_per_nat: of scores.
        decay: what earlier steps count from now on, if there is a verdict at all.
    """
    _update_acceptance_kernel[(1,)](
        judged,
        reached,
        *result.arguments(),
        decay,
        BINS_PER_NAT=bins_per_nat,
        BINS=judged.shape[1],
        NODES=next_power_of_2(result.score.shape[1]),
        PLACES=next_power_of_2(result.path.shape[1]),
        TILE=_TILE,
        num_warps=8,
    )


@jit
def _cell_of(
    at,
    node,
    wanted,
    score,
    origin,
    temperatures,
    num_nodes,
    BINS_PER_NAT: tl.constexpr,
    BINS: tl.constexpr,
):
    """The cell in which the node of slot `at` counts: 2 · BINS where it is none of ours."""
    entry = at * num_nodes + node
    ours = tl.load(origin + entry, mask=wanted, other=0) > 0
    logprob = tl.load(score + entry, mask=ours, other=float("-inf"))
    place = tl.minimum(tl.maximum(-BINS_PER_NAT * logprob, 0.0), BINS - 1e-3).to(tl.int32)
    is_sampling = (tl.load(temperatures + at, mask=ours, other=0.0) > 0).to(tl.int32)
    counts = (logprob > float("-inf")) & (logprob < float("inf"))
    return tl.where(counts, is_sampling * BINS + place, 2 * BINS)


@jit(do_not_specialize=["num_requests"])
def _update_acceptance_kernel(
    judged,  # [2, BINS] fp32
    reached,  # [2, BINS] fp32
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
    decay,
    BINS_PER_NAT: tl.constexpr,
    BINS: tl.constexpr,
    NODES: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    # Cells from 2 · BINS on are for what does not count.
    cell, one = tl.arange(0, 4 * BINS), tl.arange(0, TILE)
    seen, kept = tl.zeros([4 * BINS], tl.int32), tl.zeros([4 * BINS], tl.int32)
    for first in range(0, num_requests, TILE // NODES):
        request, node = first + one // NODES, one % NODES
        there = request < num_requests
        at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
        run = tl.load(num_run + request * run_stride, mask=there, other=0).to(tl.int32)
        wanted = node < tl.minimum(run, num_nodes)
        at = _cell_of(at, node, wanted, score, origin, temperatures, num_nodes, BINS_PER_NAT, BINS)
        seen += tl.histogram(at, 4 * BINS)
    for first in range(0, num_requests, TILE // PLACES):
        request, place = first + one // PLACES, one % PLACES
        there = request < num_requests
        at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
        run = tl.load(num_run + request * run_stride, mask=there, other=0).to(tl.int32)
        end = tl.load(accepted + request * accepted_stride, mask=there, other=0).to(tl.int32)
        on_path = there & (place <= end) & (place < path_len)
        step = tl.load(path + request.to(tl.int64) * path_stride + place, mask=on_path, other=0)
        wanted = (step > 0) & (step <= tl.minimum(run, num_nodes))
        at = _cell_of(
            at, step - 1, wanted, score, origin, temperatures, num_nodes, BINS_PER_NAT, BINS
        )
        kept += tl.histogram(at, 4 * BINS)

    inside = cell < 2 * BINS
    any_seen = tl.sum(tl.where(inside, seen, 0), 0) > 0
    keep = tl.where(any_seen, decay, 1.0)
    seen = tl.load(judged + cell, mask=inside, other=0.0) * keep + seen.to(tl.float32)
    kept = tl.load(reached + cell, mask=inside, other=0.0) * keep + kept.to(tl.float32)
    tl.debug_barrier()  # every warp reads these, one writes them
    tl.store(judged + cell, seen, mask=inside)
    tl.store(reached + cell, kept, mask=inside)
