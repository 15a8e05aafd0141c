"""Lazy routing: what a step wants of the second drafter, and what verdicts teach; one launch each.

The torch references are `LazyGate.wants` over `route.confidence`, and `LazyGate.learn`, of
`vllm_specblock/combine/`. Each is one program: requests are few, and their trees small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..verify.verification_result import VerificationResult

_TILE = 2048  # nodes of several requests that the program looks at together
_REQUESTS = 64  # verdicts likewise


@dataclass(frozen=True)
class GateState:
    """What a gate keeps, see `LazyGate`; changed in place.

    Attributes:
        steps, accepted: [2, B] fp32.
        threshold: [] int64.
        offset: bucket of a confidence of 1, before it is cut to 0 … B − 1.
        cost, decay: as the gate's.
        spread, explore_bits: a key explores if the top bits of its product with spread are 0.
    """

    steps: torch.Tensor
    accepted: torch.Tensor
    threshold: torch.Tensor
    offset: int
    cost: float
    decay: float
    spread: int
    explore_bits: int


def most_want_triton(
    gate: GateState,
    logprob: torch.Tensor,
    size: torch.Tensor,
    mean: bool,
    step: torch.Tensor,
    asked: bool,
    req_idx: torch.Tensor,
    sure: torch.Tensor,
    both: torch.Tensor,
) -> torch.Tensor:
    """Whether most of R requests want the second drafter; [1] bool.

    Args:
        logprob: [R, N] fp32 and size: [R] int32, of the first drafter's trees; contiguous.
        mean: the confidence is the nodes' mean probability, or else their sum.
        step: [1] int64, one more from now on, and the key of all requests.
        asked: the second drafter drafts in this step.
        req_idx: [R] int64, each request's slot.
        sure, both: [S] fp32 and bool, by slot: the confidence and `asked` are kept there.
    """
    nodes = next_power_of_2(logprob.shape[1])
    want = torch.empty(1, dtype=torch.bool, device=logprob.device)
    _most_want_kernel[(1,)](
        gate.threshold,
        logprob.contiguous(),
        size,
        step,
        req_idx,
        req_idx.stride(0),
        sure,
        both,
        want,
        len(req_idx),
        logprob.shape[1],
        int(asked),
        gate.offset,
        MEAN=mean,
        BUCKETS=gate.steps.shape[1],
        SPREAD=gate.spread,
        SHIFT=64 - gate.explore_bits,
        NODES=nodes,
        BLOCK=max(1, _TILE // nodes),
        num_warps=4,
    )
    return want


def learn_gate_triton(
    gate: GateState, sure: torch.Tensor, both: torch.Tensor, result: VerificationResult
) -> None:
    """Take note of a step, and move the threshold.

    Args:
        sure, both: as `most_want_triton` left them.
    """
    req_idx, run, accepted = result.req_idx, result.num_run, result.accepted
    _learn_kernel[(1,)](
        gate.steps,
        gate.accepted,
        gate.threshold,
        sure,
        both,
        req_idx,
        req_idx.stride(0),
        run,
        run.stride(0),
        accepted,
        accepted.stride(0),
        result.origin,
        result.origin.stride(0),
        len(req_idx),
        gate.offset,
        gate.cost,
        gate.decay,
        BUCKETS=gate.steps.shape[1],
        BLOCK=_REQUESTS,
        num_warps=4,
    )


@jit
def _bucket(confidence, offset, BUCKETS: tl.constexpr):
    """As `LazyGate.bucket`, int32; confidences are above 0."""
    half_octave = tl.floor(2 * tl.log2(confidence)) + offset
    return tl.minimum(tl.maximum(half_octave, 0.0), BUCKETS - 1.0).to(tl.int32)


@jit(do_not_specialize=["req_idx", "num_requests", "asked"])
def _most_want_kernel(
    threshold,  # [] int64
    logprob,  # [R, num_nodes] fp32
    size,  # [R] int32
    step,  # [1] int64
    req_idx,  # [R] int64
    req_idx_stride,
    sure,  # [S] fp32
    both,  # [S] bool
    want,  # [1] bool
    num_requests,  # R
    num_nodes,
    asked,
    offset,
    MEAN: tl.constexpr,
    BUCKETS: tl.constexpr,
    SPREAD: tl.constexpr,
    SHIFT: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = tl.load(step) + 1
    # Every warp reads the counter, one writes it: not before all have read.
    tl.debug_barrier()
    tl.store(step, key)
    explores = (key * SPREAD) >> SHIFT == 0
    limit = tl.load(threshold)
    node, wanted = tl.arange(0, NODES)[None, :], 0
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < num_requests
        inside = there[:, None] & (node < num_nodes)
        at = logprob + request.to(tl.int64)[:, None] * num_nodes + node
        total = tl.sum(tl.exp(tl.load(at, mask=inside, other=float("-inf"))), 1)
        if MEAN:
            nodes = tl.load(size + request, mask=there, other=1)
            total = total / tl.maximum(nodes, 1).to(tl.float32)
        unsure = _bucket(tl.where(total > 0, total, 1.0), offset, BUCKETS) < limit
        wants = (unsure ^ explores) | (total == 0)
        wanted += tl.sum((wants & there).to(tl.int32), 0)
        at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
        tl.store(sure + at, total, mask=there)
        tl.store(both + at, tl.full([BLOCK], 0, tl.int32) + asked != 0, mask=there)
    tl.store(want, 2 * wanted >= num_requests)


@jit(do_not_specialize=["num_requests"])
def _learn_kernel(
    steps,  # [2, BUCKETS] fp32
    tokens,  # [2, BUCKETS] fp32
    threshold,  # [] int64
    sure,  # [S] fp32
    both,  # [S] bool
    req_idx,  # [R]
    req_idx_stride,
    num_run,  # [R]
    run_stride,
    accepted,  # [R]
    accepted_stride,
    origin,  # [S, N] uint8
    origin_stride,
    num_requests,  # R
    offset,
    cost,
    decay,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bucket = tl.arange(0, BUCKETS)
    alone_steps, both_steps = tl.zeros([BUCKETS], tl.float32), tl.zeros([BUCKETS], tl.float32)
    alone_got, both_got = tl.zeros([BUCKETS], tl.float32), tl.zeros([BUCKETS], tl.float32)
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < num_requests
        at = tl.load(req_idx + request * req_idx_stride, mask=there, other=0).to(tl.int64)
        there = there & (tl.load(num_run + request * run_stride, mask=there, other=0) > 0)
        there = there & (tl.load(origin + at * origin_stride, mask=there, other=0) > 0)
        confidence = tl.load(sure + at, mask=there, other=0.0)
        # Where the first drafter has nothing there is no choice, and nothing to learn.
        there = there & (confidence > 0)
        mine = _bucket(tl.where(there, confidence, 1.0), offset, BUCKETS)
        hit = (mine[:, None] == bucket[None, :]) & there[:, None]
        second = (tl.load(both + at, mask=there, other=0) != 0)[:, None]
        got = tl.load(accepted + request * accepted_stride, mask=there, other=0)
        got = got.to(tl.float32)[:, None]
        alone_steps += tl.sum((hit & (second == 0)).to(tl.float32), 0)
        both_steps += tl.sum((hit & second).to(tl.float32), 0)
        alone_got += tl.sum(tl.where(hit & (second == 0), got, 0.0), 0)
        both_got += tl.sum(tl.where(hit & second, got, 0.0), 0)

    keep = tl.where(tl.sum(alone_steps + both_steps, 0) > 0, decay, 1.0)
    alone_steps += tl.load(steps + bucket) * keep
    both_steps += tl.load(steps + BUCKETS + bucket) * keep
    alone_got += tl.load(tokens + bucket) * keep
    both_got += tl.load(tokens + BUCKETS + bucket) * keep
    tl.debug_barrier()  # every warp reads these, one writes them
    tl.store(steps + bucket, alone_steps)
    tl.store(steps + BUCKETS + bucket, both_steps)
    tl.store(tokens + bucket, alone_got)
    tl.store(tokens + BUCKETS + bucket, both_got)

    # As `LazyGate._best`: every estimate starts from one imagined step.
    seen, got = alone_steps + both_steps, alone_got + both_got
    usual = (got + 1) / (seen + 1)
    rate = 1 + (tl.sum(got, 0) + 1) / (tl.sum(seen, 0) + 1)
    alone = 1 + (alone_got + usual) / (alone_steps + 1)
    second = 1 + (both_got + usual + 2 * cost * rate) / (both_steps + 1)
    share = seen + 1 / BUCKETS
    start, whole = tl.sum(share * alone, 0), tl.sum(share, 0)
    gain, drafts = tl.cumsum(share * (second - alone), 0), tl.cumsum(share, 0)
    per_time = (start + gain) / (whole + cost * drafts)
    best = tl.maximum(tl.max(per_time, 0), start / whole)
    tl.store(threshold, tl.max(tl.where(per_time >= best, bucket + 1, 0), 0).to(tl.int64))
