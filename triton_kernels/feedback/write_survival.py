"""Survival probabilities of new trees' nodes.

The torch reference is `AcceptanceEstimator.steps`. Each program fits the rates itself, which is
faster than another launch. The lowest bit of a float says whether its node is `later`: the host
gets it with the number, without a copy of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl


class Later(NamedTuple):
    """Nodes of drafters' later blocks are deeper than the first, and of no other drafter."""

    depth: torch.Tensor  # [S, N+1] int64, by slot; contiguous
    origin: torch.Tensor  # [S, N] uint8, bits of a node's drafters; contiguous
    first: int  # depth of the first block
    others: int  # bits of drafters without blocks


def write_survival_triton(
    req_idx: torch.Tensor,
    score: torch.Tensor,
    temperature: torch.Tensor,
    judged: torch.Tensor,
    reached: torch.Tensor,
    believed: torch.Tensor,
    prior: float,
    bins_per_nat: int,
    steps: torch.Tensor,
    later: Later | None = None,
) -> None:
    """Launch the kernel; see `AcceptanceEstimator.write_survival`.

    Tensors by request may be columns of a table; `score` is contiguous; bins are a power of two.
    """
    if len(req_idx):
        _write_survival_kernel[(len(req_idx),)](
            req_idx,
            req_idx.stride(0),
            score,
            temperature,
            temperature.stride(0),
            judged,
            reached,
            believed,
            steps,
            steps.stride(0),
            prior,
            later,
            NUM_NODES=score.shape[1],
            NODES=next_power_of_2(score.shape[1] + 1),
            BINS_PER_NAT=bins_per_nat,
            BINS=len(believed),
            num_warps=4,
        )


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def _smaller(a, b):
    return tl.minimum(a, b)


@jit
def _rates(judged_ptr, reached_ptr, believed_ptr, prior, BINS: tl.constexpr):
    """Return [BINS], how often nodes are reached: isotonic regression by its min-max formula."""
    bins = tl.arange(0, BINS)
    count = tl.load(judged_ptr + bins) + prior
    found = tl.load(reached_ptr + bins) + prior * tl.load(believed_ptr + bins)
    later = bins[:, None] <= bins[None, :]  # [j, k]: bin k is j or less confident
    counts = tl.cumsum(tl.where(later, count[None, :], 0.0), 1)
    # The mean over bins j … k; a count of 1 where there are none.
    mean = tl.cumsum(tl.where(later, found[None, :], 0.0), 1) / tl.where(later, counts, 1.0)
    mean = tl.where(later, mean, float("-inf"))
    best_from = tl.associative_scan(mean, 1, _larger, reverse=True)  # [j, i]: over all k ≥ i
    return tl.min(tl.where(later, best_from, float("inf")), 0)


@jit
def _survival(rates, logprob, BINS_PER_NAT: tl.constexpr, BINS: tl.constexpr):
    """[NODES], 0 where there is no node; never rises. Between two bins' middles it is a line."""
    bins = tl.arange(0, BINS)
    place = tl.minimum(tl.maximum(-BINS_PER_NAT * logprob, 0.0), BINS - 1e-3) - 0.5
    place = tl.minimum(tl.maximum(place, 0.0), BINS - 1.0)
    share = tl.maximum(1.0 - tl.abs(place[:, None] - bins.to(tl.float32)[None, :]), 0.0)
    likely = tl.associative_scan(tl.sum(share * rates[None, :], 1), 0, _smaller)
    return tl.where((logprob > float("-inf")) & (logprob < float("inf")), likely, 0.0)


# A step's requests may be a part of a larger table.
@jit(do_not_specialize=["req_idx_ptr", "temperature_ptr"])
def _write_survival_kernel(
    req_idx_ptr,  # [R]
    req_idx_stride,
    score_ptr,  # [S, NUM_NODES] fp32
    temperature_ptr,  # [R] fp32
    temperature_stride,
    judged_ptr,  # [2, BINS] fp32
    reached_ptr,  # [2, BINS] fp32
    believed_ptr,  # [BINS] fp32
    steps_ptr,  # [≥ R, NUM_NODES] fp32, entries of a row are consecutive
    steps_stride,
    prior,
    later,  # Later; or None
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    BINS_PER_NAT: tl.constexpr,
    BINS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(req_idx_ptr + request * req_idx_stride).to(tl.int64)
    score_ptr += at * NUM_NODES
    entry = tl.arange(0, NODES)
    inside = entry < NUM_NODES
    own = tl.load(score_ptr + entry, mask=inside, other=float("-inf"))
    kind = tl.where(tl.load(temperature_ptr + request * temperature_stride) > 0, BINS, 0)
    rates = _rates(judged_ptr + kind, reached_ptr + kind, believed_ptr, prior, BINS)
    survival = _survival(rates, own, BINS_PER_NAT, BINS)
    # The nodes one place on, the first of which is the root: that is there for certain. As a score
    # it is the best, since the least of all up to a node is taken.
    before = tl.load(score_ptr - 1 + entry, mask=inside & (entry > 0), other=float("-inf"))
    before = _survival(rates, tl.where(entry > 0, before, 0.0), BINS_PER_NAT, BINS)
    before = tl.where(entry > 0, before, 1.0)
    step = tl.where(before > 0, survival / tl.where(before > 0, before, 1.0), 0.0)
    if later is not None:
        deep = tl.load(later.depth + at * (NUM_NODES + 1) + 1 + entry, mask=inside, other=0)
        other = tl.load(later.origin + at * NUM_NODES + entry, mask=inside, other=0) & later.others
        bits = step.to(tl.int32, bitcast=True) & -2
        deep = (deep > later.first) & (other == 0) & (bits > 0)
        step = (bits - deep.to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(steps_ptr + request * steps_stride + entry, step, mask=inside)
