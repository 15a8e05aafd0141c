"""Siblings side by side in 0 … 1, each as wide as its probability, in one launch.

The torch reference is `vllm_specblock.verify.synthetic_acceptance.SyntheticAcceptance.note`: for
benchmarks.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl

_OTHERS = 32  # nodes that all others are compared with at a time


def share_siblings_triton(
    req_idx: torch.Tensor,
    parent: torch.Tensor,
    logprob: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
) -> None:
    """Write `low` and `high` for the slots of R trees.

    Args:
        req_idx: [R] integers; may be a column of a table.
        parent, logprob: as `DraftTree` has them.
        low, high: [S, N] fp32, contiguous.
    """
    num_requests, num_nodes = parent.shape
    if num_requests and num_nodes:
        nodes = next_power_of_2(num_nodes)
        _share_siblings_kernel[(num_requests,)](
            req_idx,
            req_idx.stride(0),
            parent,
            *parent.stride(),
            logprob,
            *logprob.stride(),
            low,
            high,
            NUM_NODES=num_nodes,
            NODES=nodes,
            OTHERS=min(nodes, _OTHERS),
            num_warps=4,
        )


@jit
def _share_siblings_kernel(
    req_idx,  # [R]
    req_idx_stride,
    parent,  # [R, NUM_NODES] int32
    parent_stride,
    parent_step,
    logprob,  # [R, NUM_NODES] fp32
    logprob_stride,
    logprob_step,
    low,  # [S, NUM_NODES] fp32
    high,
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """One tree. Nodes are counted from 0 here, and parents from 1, as everywhere."""
    request = tl.program_id(0).to(tl.int64)
    parent += request * parent_stride
    logprob += request * logprob_stride
    node = tl.arange(0, NODES)
    up, share = _share(parent, parent_step, logprob, logprob_step, node, NUM_NODES)
    before = tl.zeros([NODES], tl.float32)
    for first in range(0, NUM_NODES, OTHERS):
        other = first + tl.arange(0, OTHERS)
        others_up, others = _share(parent, parent_step, logprob, logprob_step, other, NUM_NODES)
        sibling = (others_up[None, :] == up[:, None]) & (other[None, :] < node[:, None])
        before += tl.sum(tl.where(sibling, others[None, :], 0.0), 1)
    entry = tl.load(req_idx + request * req_idx_stride).to(tl.int64) * NUM_NODES + node
    tl.store(low + entry, before, mask=node < NUM_NODES)
    tl.store(high + entry, before + share, mask=node < NUM_NODES)


@jit
def _share(parent, parent_step, logprob, logprob_step, node, NUM_NODES: tl.constexpr):
    """Parents of nodes, and their probabilities given these; 0 of a node that is not in use.

    Such a node hangs from the root.
    """
    up = tl.load(parent + node * parent_step, mask=node < NUM_NODES, other=-1)
    used = up >= 0
    score = tl.load(logprob + node * logprob_step, mask=used, other=0.0)
    above = tl.load(logprob + (up - 1) * logprob_step, mask=up > 0, other=0.0)
    return tl.maximum(up, 0), tl.where(used, tl.exp(score - above), 0.0)
