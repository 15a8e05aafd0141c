"""What new trees' nodes are worth, and no tree for requests that get none: in one launch.

The torch references are `ReachTable.steps` and `Combined.empty_where`. Every program fits the rates
anew for its request: a few additions over a table of 32 × 32, where a launch to do it once for
all would take longer. Each mean of the fit has a sum of its own; the reference takes differences
of running sums, which lose digits once much was counted.
"""

from __future__ import annotations

import torch

from .optional_triton import jit, next_power_of_2, tl


def offer_nodes_triton(
    slot: torch.Tensor,
    asleep: torch.Tensor,
    temperature: torch.Tensor,
    judged: torch.Tensor,
    reached: torch.Tensor,
    believed: torch.Tensor,
    prior: float,
    bins_per_nat: int,
    steps: torch.Tensor,
    token: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    logprob: torch.Tensor,
    size: torch.Tensor,
    ancestors: torch.Tensor,
    origin: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Write `steps`, and give the trees of those that are awake.

    Args:
        slot: [R] integers; may be a column of a table.
        asleep: [S] bool, by slot, whose tree becomes empty.
        temperature: [R] fp32.
        judged, reached: [2, bins] fp32, as `ReachTable` keeps them; bins a power of two.
        believed: [bins] fp32, what a bin is worth before anything was seen.
        prior: nodes that each bin counts before anything was seen.
        bins_per_nat: of scores.
        steps: [≥ R, N] fp32, written to in its first R rows, as `ReachTable.steps` says.
        token, parent, depth, logprob, size, ancestors: as `DraftTree` has them.
        origin: [R, N] uint8, as `Combined` has it.

    Returns:
        token, parent, depth, logprob, size, ancestors and origin, all new and contiguous.
    """
    given = (token, parent, depth, logprob, origin, ancestors)
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in given]
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*given, size)]
    num_requests, num_nodes = token.shape
    words, nodes = ancestors.shape[2], next_power_of_2(num_nodes + 1)
    if num_requests:
        _offer_nodes_kernel[(num_requests,)](
            slot, slot.stride(0), asleep, temperature, temperature.stride(0), judged, reached,
            believed, steps, steps.stride(0), *given, *(x.stride(0) for x in given),
            given[-1].stride(1), size, size.stride(0), *made, prior, BINS_PER_NAT=bins_per_nat,
            BINS=len(believed), NUM_NODES=num_nodes, NODES=nodes, W=words,
            WORDS=next_power_of_2(words), num_warps=4,
        )  # fmt: skip
    token, parent, depth, logprob, origin, ancestors, size = made
    return token, parent, depth, logprob, size, ancestors, origin


@jit
def _larger(a, b):
    return tl.maximum(a, b)


@jit
def _smaller(a, b):
    return tl.minimum(a, b)


@jit
def _rates(judged, reached, believed, prior, BINS: tl.constexpr):
    """[BINS], how often nodes of a bin are reached: isotonic regression by its min-max formula."""
    bins = tl.arange(0, BINS)
    count = tl.load(judged + bins) + prior
    found = tl.load(reached + bins) + prior * tl.load(believed + bins)
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
@jit(do_not_specialize=["slot", "temperature"])
def _offer_nodes_kernel(
    slot,  # [R]
    slot_stride,
    asleep,  # [S] bool
    temperature,  # [R] fp32
    temperature_stride,
    judged,  # [2, BINS] fp32
    reached,  # [2, BINS] fp32
    believed,  # [BINS] fp32
    steps,  # [≥ R, NUM_NODES] fp32, entries of a row are consecutive
    steps_stride,
    token,  # [R, NUM_NODES] int64, as the four after it: entries of a row are consecutive
    parent,  # int32
    depth,  # int32
    logprob,  # fp32
    origin,  # uint8
    ancestors,  # [R, NUM_NODES + 1, W] int64, words of a node are consecutive
    token_stride, parent_stride, depth_stride, logprob_stride, origin_stride, ancestors_stride,
    node_stride,  # of ancestors
    size,  # [R] int32
    size_stride,
    new_token, new_parent, new_depth, new_logprob, new_origin, new_ancestors,  # contiguous
    new_size,
    prior,
    BINS_PER_NAT: tl.constexpr, BINS: tl.constexpr,
    NUM_NODES: tl.constexpr, NODES: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One request. NODES covers the root and all nodes, WORDS their words."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.load(slot + request * slot_stride).to(tl.int64)
    last = tl.where(tl.load(asleep + at) != 0, -1, NUM_NODES)  # node to be copied; no root: −1
    node, word = tl.arange(0, NODES), tl.arange(0, WORDS)
    inside = node < NUM_NODES
    copied, out = node < last, request * NUM_NODES + node

    score = logprob + request * logprob_stride + node
    own = tl.load(score, mask=copied, other=float("-inf"))
    kind = tl.where(tl.load(temperature + request * temperature_stride) > 0, BINS, 0)
    rates = _rates(judged + kind, reached + kind, believed, prior, BINS)
    survival = _survival(rates, own, BINS_PER_NAT, BINS)
    # The nodes one place on, the first of which is the root: that is there for certain. As a score
    # it is the best, since the least of all up to a node is taken.
    before = tl.load(score - 1, mask=copied & (node > 0), other=float("-inf"))
    before = _survival(rates, tl.where(node > 0, before, 0.0), BINS_PER_NAT, BINS)
    before = tl.where(node > 0, before, 1.0)
    step = tl.where(before > 0, survival / tl.where(before > 0, before, 1.0), 0.0)
    tl.store(steps + request * steps_stride + node, step, mask=inside)

    # Where there is no node, it is token 0, and hangs from the root.
    value = tl.load(token + request * token_stride + node, mask=copied, other=0)
    tl.store(new_token + out, value, mask=inside)
    value = tl.load(parent + request * parent_stride + node, mask=copied, other=-1)
    tl.store(new_parent + out, value, mask=inside)
    value = tl.load(depth + request * depth_stride + node, mask=copied, other=1)
    tl.store(new_depth + out, value, mask=inside)
    tl.store(new_logprob + out, own, mask=inside)
    value = tl.load(origin + request * origin_stride + node, mask=copied, other=0)
    tl.store(new_origin + out, value, mask=inside)
    count = tl.load(size + request * size_stride)
    tl.store(new_size + request, tl.where(last >= 0, count, 0))
    row = (node <= NUM_NODES)[:, None] & (word < W)[None, :]
    value = ancestors + request * ancestors_stride + node[:, None] * node_stride + word[None, :]
    value = tl.load(value, mask=row & (node <= last)[:, None], other=0)
    mine = (node // 64)[:, None] == word[None, :]
    # 1 << 63 is the sign bit.
    alone = tl.full([NODES, WORDS], 1, tl.int64) << (node % 64).to(tl.int64)[:, None]
    alone = tl.where(mine, alone, 0) | (word == 0).to(tl.int64)[None, :]
    to = request * (NUM_NODES + 1) * W + node[:, None] * W + word[None, :]
    tl.store(new_ancestors + to, tl.where(last >= 0, value, alone), mask=row)
