"""Choice of the drafts to verify in a batch, and the resulting row starts, in one launch.

The drafts with the largest survival, the running product of confidences, are admitted until the
budget is spent. Products are float64, rounded to float32. Ties go to the earlier request and node,
so a request's admitted drafts are always its first ones.

Survival never rises along a request, so bisection counts its drafts above a threshold. The
threshold is found digit by digit, since non-negative floats order like their bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl

_TILE = 2048  # drafts of several requests that the program looks at together
_REQUESTS = 64  # whose rows it bisects together
_DIGIT_BITS, _DIGITS = 5, 6  # enough for keys of 30 bits, and 1.0 is 0x3f800000


class DraftStarts(NamedTuple):
    """Drafts of R requests in S request slots, and the rows to be written; contiguous."""

    # [S, N] fp32, how likely a draft is accepted if the one before was; read as 0 to 1, NaN as 0.
    confidence: torch.Tensor
    counts: torch.Tensor  # [2, R] int32: every request's drafts (at most N), and its other tokens
    logit_start: torch.Tensor  # [≥ R + 1] int32, first logit of each request, then the end
    row_start: torch.Tensor  # [≥ R + 1] int32, likewise its rows; the end from R + 1 on


def reallocate_drafts_triton(drafts: DraftStarts, req_idx: torch.Tensor, budget: int) -> None:
    """Launch the kernel; see `engine.draft_allocation`."""
    count, num_nodes = len(req_idx), drafts.confidence.shape[1]
    key = torch.empty(count, num_nodes, dtype=torch.int32, device=req_idx.device)
    _reallocate_drafts_kernel[(1,)](
        drafts,
        req_idx,
        req_idx.stride(0),
        key,
        len(drafts.row_start),
        count,
        budget,
        NUM_NODES=num_nodes,
        num_warps=8,
    )


@jit
def _above(key_ptr, row, there, threshold, NUM_NODES: tl.constexpr):
    """Return how many keys of each row are above the threshold; keys of a row never rise.

    row, there, threshold: broadcastable; -1 ≤ threshold.
    """
    PROBES: tl.constexpr = NUM_NODES.bit_length()
    found = tl.zeros_like(row + threshold)
    for probe in tl.static_range(PROBES):
        more = found + (1 << (PROBES - 1 - probe))
        at = key_ptr + row.to(tl.int64) * NUM_NODES + more - 1
        value = tl.load(at, mask=there & (more <= NUM_NODES), other=-1)
        found = tl.where(value > threshold, more, found)
    return found


# Only what is always the same is compiled for.
@jit(do_not_specialize=["req_idx_ptr", "num_starts", "num_requests", "budget"])
def _reallocate_drafts_kernel(
    drafts,  # DraftStarts
    req_idx_ptr,  # [R]
    req_idx_stride,
    key_ptr,  # [R, NUM_NODES] int32, memory of this launch alone
    num_starts,  # entries of `row_start`
    num_requests,  # R
    budget,
    NUM_NODES: tl.constexpr,
    TILE: tl.constexpr = _TILE,
    REQUESTS: tl.constexpr = _REQUESTS,
    DIGIT_BITS: tl.constexpr = _DIGIT_BITS,
    DIGITS: tl.constexpr = _DIGITS,
):
    NODES: tl.constexpr = next_power_of_2(NUM_NODES)
    # Survivals as whole numbers of the same order, and -1 where there is no draft.
    node, some = tl.arange(0, NODES)[None, :], tl.arange(0, TILE // NODES)
    for first in range(0, num_requests, TILE // NODES):
        request = first + some
        there = request < num_requests
        at = tl.load(req_idx_ptr + request * req_idx_stride, mask=there, other=0)
        at = at.to(tl.int64)[:, None] * NUM_NODES + node
        inside = there[:, None] & (node < NUM_NODES)
        survival = tl.load(drafts.confidence + at, mask=inside, other=1.0)
        survival = tl.where(survival > 0, tl.minimum(survival, 1.0), 0.0)  # 0 for NaN
        survival = tl.cumprod(survival.to(tl.float64), 1).to(tl.float32)
        own = survival.to(tl.int32, bitcast=True)
        known = node < tl.load(drafts.counts + request, mask=there, other=0)[:, None]
        to = key_ptr + request.to(tl.int64)[:, None] * NUM_NODES + node
        tl.store(to, tl.where(known, own, -1), mask=inside)
    tl.debug_barrier()

    # The key of the last draft admitted, the largest that as many as the budget reach.
    digit, some = tl.arange(0, 1 << DIGIT_BITS), tl.arange(0, REQUESTS)
    last = 0
    for place in range(DIGITS):
        larger = last + (digit << (DIGIT_BITS * (DIGITS - 1 - place)))
        reached = tl.zeros([1 << DIGIT_BITS], tl.int32)
        for first in range(0, num_requests, REQUESTS):
            row = (first + some)[:, None]
            there = row < num_requests
            above = _above(key_ptr, row, there, larger[None, :] - 1, NUM_NODES)
            reached += tl.sum(above, 0)
        last = tl.max(tl.where((digit == 0) | (reached >= budget), larger, 0), 0)

    left = budget  # for those with that very key
    for first in range(0, num_requests, REQUESTS):
        row = first + some
        left -= tl.sum(_above(key_ptr, row, row < num_requests, last, NUM_NODES), 0)

    logits, rows = 0, 0
    for first in range(0, num_requests, REQUESTS):
        row = first + some
        there = row < num_requests
        sure = _above(key_ptr, row, there, last, NUM_NODES)
        tied = _above(key_ptr, row, there, last - 1, NUM_NODES) - sure
        before = tl.cumsum(tied, 0) - tied
        admitted = sure + tl.minimum(tl.maximum(left - before, 0), tied)
        left = tl.maximum(left - tl.sum(tied, 0), 0)
        own = tl.where(there, admitted + 1, 0)
        tl.store(drafts.logit_start + 1 + row, logits + tl.cumsum(own, 0), mask=there)
        logits += tl.sum(own, 0)
        own = admitted + tl.load(drafts.counts + num_requests + row, mask=there, other=0)
        tl.store(drafts.row_start + 1 + row, rows + tl.cumsum(own, 0), mask=there)
        rows += tl.sum(own, 0)
    tl.store(drafts.logit_start, 0)
    tl.store(drafts.row_start, 0)
    for first in range(num_requests + 1, num_starts, REQUESTS):
        tl.store(drafts.row_start + first + some, rows, mask=first + some < num_starts)
