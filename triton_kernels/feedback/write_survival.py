"""Survival probabilities of new trees' nodes; trees of paused requests are dropped.

The torch references are `AcceptanceEstimator.steps` and `Combined.empty_where`. Each program fits
the rates for its request: a launch to fit them once would take longer.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, tl
from ..tree.copy_tree import Copies, copy_tree


def write_survival_triton(
    req_idx: torch.Tensor,
    paused: torch.Tensor,
    temperature: torch.Tensor,
    judged: torch.Tensor,
    reached: torch.Tensor,
    believed: torch.Tensor,
    prior: float,
    bins_per_nat: int,
    steps: torch.Tensor,
    **trees: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Write `steps`, and give the trees of those that are awake.

    Args:
        req_idx: [R] integers; may be a column of a table.
        paused: [S] bool, by slot, whose tree becomes empty.
        temperature: [R] fp32.
        judged, reached: [2, bins] fp32, as `AcceptanceEstimator` keeps them; bins a power of two.
        believed: [bins] fp32, what a bin is worth before anything was seen.
        prior: nodes that each bin counts before anything was seen.
        bins_per_nat: of scores.
        steps: [≥ R, N] fp32, written to in its first R rows, as `AcceptanceEstimator.steps` says.
        trees: by name, as `Copies.of` takes them.

    Returns:
        token, parent, depth, logprob, size, ancestors and origin, all new and contiguous.
    """
    copies = Copies.of(**trees)
    if len(req_idx):
        _write_survival_kernel[(len(req_idx),)](
            req_idx,
            req_idx.stride(0),
            paused,
            temperature,
            temperature.stride(0),
            judged,
            reached,
            believed,
            steps,
            steps.stride(0),
            prior,
            *copies,
            BINS_PER_NAT=bins_per_nat,
            BINS=len(believed),
            num_warps=4,
        )
    return copies.made


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def _smaller(a, b):
    return tl.minimum(a, b)


@jit
def _rates(judged_ptr, reached_ptr, believed_ptr, prior, BINS: tl.constexpr):
    """[BINS], how often nodes of a bin are reached: isotonic regression by its min-max formula."""
    bins = tl.arange(0, BINS)
    count = tl.load(judged_ptr + bins) + prior
    found = tl.load(reached_ptr + bins) + prior * tl.load(believed_ptr + bins)
    later = bins[:, None] <= bins[None, :]  # [j, k]: bin k is j or a less sure one
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
    paused_ptr,  # [S] bool
    temperature_ptr,  # [R] fp32
    temperature_stride,
    judged_ptr,  # [2, BINS] fp32
    reached_ptr,  # [2, BINS] fp32
    believed_ptr,  # [BINS] fp32
    steps_ptr,  # [≥ R, NUM_NODES] fp32, entries of a row are consecutive
    steps_stride,
    prior,
    given,  # GivenTrees
    strides,  # GivenTrees
    node_stride,  # of ancestors
    made,  # GivenTrees
    TREE: tl.constexpr,  # TreeSizes
    BINS_PER_NAT: tl.constexpr,
    BINS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(req_idx_ptr + request * req_idx_stride).to(tl.int64)
    last = tl.where(tl.load(paused_ptr + at) != 0, -1, TREE.NUM_NODES)  # see `copy_tree`
    entry = tl.arange(0, TREE.NODES)
    inside, copied = entry < TREE.NUM_NODES, entry < last

    score = given.logprob + request * strides.logprob
    own = tl.load(score + entry, mask=copied, other=float("-inf"))
    kind = tl.where(tl.load(temperature_ptr + request * temperature_stride) > 0, BINS, 0)
    rates = _rates(judged_ptr + kind, reached_ptr + kind, believed_ptr, prior, BINS)
    survival = _survival(rates, own, BINS_PER_NAT, BINS)
    # The nodes one place on, the first of which is the root: that is there for certain. As a score
    # it is the best, since the least of all up to a node is taken.
    before = tl.load(score - 1 + entry, mask=copied & (entry > 0), other=float("-inf"))
    before = _survival(rates, tl.where(entry > 0, before, 0.0), BINS_PER_NAT, BINS)
    before = tl.where(entry > 0, before, 1.0)
    step = tl.where(before > 0, survival / tl.where(before > 0, before, 1.0), 0.0)
    tl.store(steps_ptr + request * steps_stride + entry, step, mask=inside)

    copy_tree(last, given, strides, node_stride, made, request, TREE)
    count = tl.load(given.size + request * strides.size)
    tl.store(made.size + request, tl.where(last >= 0, count, 0))
