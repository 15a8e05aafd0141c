"""Survival probabilities of new trees' nodes.

The reference is `write_survival_numba.py`. Each program fits the rates itself, which is faster than
another launch. The lowest bit of a float says whether its node is `later`: the host gets it with
the number, without a copy of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..optional_triton import jit, larger, next_power_of_2, tl


class Later(NamedTuple):
    """Nodes of drafters' later blocks are deeper than the first, and of no other drafter."""

    depth: torch.Tensor  # [S, N+1] int64, by slot; contiguous
    origin: torch.Tensor  # [S, N] uint8, bits of a node's drafters; contiguous
    first: int  # depth of the first block, or of all
    others: int  # bits of drafters without blocks


class SeenNodes(NamedTuple):
    """Verified nodes of greedy and of sampling requests, by bins of their scores."""

    judged: torch.Tensor  # [2, bins] fp32
    reached: torch.Tensor  # [2, bins] fp32, those on the accepted path
    believed: torch.Tensor  # [bins] fp32, the score of each bin; bins are a power of two
    prior: float  # nodes of each bin, reached as often as `believed`
    bins_per_nat: int


def marked(steps: np.ndarray) -> np.ndarray:
    """Return the nodes that are marked as `later`, [R, N] bool, from [R, N] fp32."""
    return (steps.view(np.int32) & 1).astype(bool)


def write_survival_triton(
    req_idx: torch.Tensor,
    score: torch.Tensor,
    temperature: torch.Tensor,
    seen: SeenNodes,
    steps: torch.Tensor,
    later: Later,
) -> None:
    """Write vLLM's confidences of R new trees' nodes, marked where a node is `later`.

    Their running product is the probability that a node is on the accepted path.

    Args:
        req_idx, temperature: [R], may be columns of a table.
        score: [S, N] fp32 by slot, contiguous; descends in a tree, −inf where there is no node.
        steps: [≥ R, N] fp32; written, 0 where there is no node.
    """
    _write_survival_kernel[(len(req_idx),)](
        req_idx,
        req_idx.stride(0),
        score,
        temperature,
        temperature.stride(0),
        seen,
        steps,
        steps.stride(0),
        later,
        NUM_NODES=score.shape[1],
        BINS=len(seen.believed),
    )


@jit
def _rates(seen, kind, BINS: tl.constexpr):
    """Return [BINS], how often nodes are reached: isotonic regression by its min-max formula."""
    bins = tl.arange(0, BINS)
    count = tl.load(seen.judged + kind + bins) + seen.prior
    found = tl.load(seen.reached + kind + bins) + seen.prior * tl.load(seen.believed + bins)
    later = bins[:, None] <= bins[None, :]  # [j, k]: bin k is j or less confident
    counts = tl.cumsum(tl.where(later, count[None, :], 0.0), 1)
    # The mean over bins j … k; a count of 1 where there are none.
    mean = tl.cumsum(tl.where(later, found[None, :], 0.0), 1) / tl.where(later, counts, 1.0)
    mean = tl.where(later, mean, float("-inf"))
    best_from = tl.associative_scan(mean, 1, larger, reverse=True)  # [j, i]: over all k ≥ i
    return tl.min(tl.where(later, best_from, float("inf")), 0)


# A step's requests may be a part of a larger table.
@jit(do_not_specialize=["req_idx_ptr", "temperature_ptr"])
def _write_survival_kernel(
    req_idx_ptr,  # [R]
    req_idx_stride,
    score_ptr,  # [S, NUM_NODES] fp32
    temperature_ptr,  # [R] fp32
    temperature_stride,
    seen,  # SeenNodes
    steps_ptr,  # [≥ R, NUM_NODES] fp32, entries of a row are consecutive
    steps_stride,
    later,  # Later
    NUM_NODES: tl.constexpr,
    BINS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(req_idx_ptr + request * req_idx_stride).to(tl.int64)
    entry, bins = tl.arange(0, next_power_of_2(NUM_NODES + 1)), tl.arange(0, BINS)
    inside = entry < NUM_NODES
    logprob = tl.load(score_ptr + at * NUM_NODES + entry, mask=inside, other=float("-inf"))
    kind = tl.where(tl.load(temperature_ptr + request * temperature_stride) > 0, BINS, 0)
    # Between two bins' middles it is a line, and it never rises.
    place = tl.minimum(tl.maximum(-seen.bins_per_nat * logprob, 0.0), BINS - 1e-3) - 0.5
    place = tl.minimum(tl.maximum(place, 0.0), BINS - 1.0)
    share = tl.maximum(1.0 - tl.abs(place[:, None] - bins.to(tl.float32)[None, :]), 0.0)
    likely = tl.sum(share * _rates(seen, kind, BINS)[None, :], 1)
    survival = -tl.associative_scan(-likely, 0, larger)
    there = (logprob > float("-inf")) & (logprob < float("inf"))
    survival = tl.where(there, survival, 0.0)
    # The root is there for certain.
    before = tl.where(entry > 0, tl.gather(survival, tl.maximum(entry - 1, 0), 0), 1.0)
    step = tl.where(before > 0, survival / tl.where(before > 0, before, 1.0), 0.0)
    deep = tl.load(later.depth + at * (NUM_NODES + 1) + 1 + entry, mask=inside, other=0)
    other = tl.load(later.origin + at * NUM_NODES + entry, mask=inside, other=0) & later.others
    bits = step.to(tl.int32, bitcast=True) & -2
    deep = (deep > later.first) & (other == 0) & (bits > 0)
    step = (bits - deep.to(tl.int32)).to(tl.float32, bitcast=True)
    tl.store(steps_ptr + request * steps_stride + entry, step, mask=inside)
