"""What verdicts teach of how often nodes of a score are reached, in one launch.

The torch reference is `ReachTable.learn` over what `Verified` works out. It is one program that
learns: requests are few and their trees small, and a second launch would cost more than what it
could spread. What it sums are whole numbers, so the same verdicts always teach the same.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..verify.verdicts import Verdicts

# Nodes, or places of paths, of several requests that the program looks at together. As many as it
# has threads or more: a histogram of fewer would lean on how the compiler spreads them.
_TILE = 2048


def learn_reach_triton(
    judged: torch.Tensor,
    reached: torch.Tensor,
    verdicts: Verdicts,
    bins_per_nat: int,
    decay: float,
) -> None:
    """Change `judged` and `reached` in place.

    Args:
        judged, reached: [2, bins] fp32, as `ReachTable` keeps them; bins a power of two.
        bins_per_nat: of scores.
        decay: what earlier steps count from now on, if there is a verdict at all.
    """
    _learn_reach_kernel[(1,)](
        judged, reached, *verdicts.arguments(), decay, BINS_PER_NAT=bins_per_nat,
        BINS=judged.shape[1], NODES=next_power_of_2(verdicts.score.shape[1]),
        PLACES=next_power_of_2(verdicts.path.shape[1]), TILE=_TILE, num_warps=8,
    )  # fmt: skip


@jit
def _cell_of(
    at, node, wanted, score, origin, heat, num_nodes, BINS_PER_NAT: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """The cell in which the node of slot `at` counts: 2 · BINS where it is none of ours."""
    entry = at * num_nodes + node
    ours = tl.load(origin + entry, mask=wanted, other=0) > 0
    logprob = tl.load(score + entry, mask=ours, other=float("-inf"))
    place = tl.minimum(tl.maximum(-BINS_PER_NAT * logprob, 0.0), BINS - 1e-3).to(tl.int32)
    hot = (tl.load(heat + at, mask=ours, other=0.0) > 0).to(tl.int32)
    counts = (logprob > float("-inf")) & (logprob < float("inf"))
    return tl.where(counts, hot * BINS + place, 2 * BINS)


@jit(do_not_specialize=["num_requests"])
def _learn_reach_kernel(
    judged,  # [2, BINS] fp32
    reached,  # [2, BINS] fp32
    slot,  # [R]
    slot_stride,
    num_run,  # [R]
    run_stride,
    accepted,  # [R]
    accepted_stride,
    path,  # [R, path_len] int64
    path_stride,
    path_len,
    score,  # [S, num_nodes] fp32
    origin,  # [S, num_nodes] uint8
    heat,  # [S] fp32
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
        at = tl.load(slot + request * slot_stride, mask=there, other=0).to(tl.int64)
        run = tl.load(num_run + request * run_stride, mask=there, other=0).to(tl.int32)
        wanted = node < tl.minimum(run, num_nodes)
        at = _cell_of(at, node, wanted, score, origin, heat, num_nodes, BINS_PER_NAT, BINS)
        seen += tl.histogram(at, 4 * BINS)
    for first in range(0, num_requests, TILE // PLACES):
        request, place = first + one // PLACES, one % PLACES
        there = request < num_requests
        at = tl.load(slot + request * slot_stride, mask=there, other=0).to(tl.int64)
        run = tl.load(num_run + request * run_stride, mask=there, other=0).to(tl.int32)
        end = tl.load(accepted + request * accepted_stride, mask=there, other=0).to(tl.int32)
        on_path = there & (place <= end) & (place < path_len)
        step = tl.load(path + request.to(tl.int64) * path_stride + place, mask=on_path, other=0)
        wanted = (step > 0) & (step <= tl.minimum(run, num_nodes))
        at = _cell_of(at, step - 1, wanted, score, origin, heat, num_nodes, BINS_PER_NAT, BINS)
        kept += tl.histogram(at, 4 * BINS)

    inside = cell < 2 * BINS
    any_seen = tl.sum(tl.where(inside, seen, 0), 0) > 0
    keep = tl.where(any_seen, decay, 1.0)
    seen = tl.load(judged + cell, mask=inside, other=0.0) * keep + seen.to(tl.float32)
    kept = tl.load(reached + cell, mask=inside, other=0.0) * keep + kept.to(tl.float32)
    tl.debug_barrier()  # every warp reads these, one writes them
    tl.store(judged + cell, seen, mask=inside)
    tl.store(reached + cell, kept, mask=inside)
