"""Verification result of a step's trees, for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import constexpr_function, jit, next_power_of_2, tl


class VerificationResult(NamedTuple):
    """Verification results of R requests in S request slots.

    Tensors by request may be columns of a table; tensors by slot are contiguous.
    """

    req_idx: torch.Tensor  # [R] integers
    num_run: torch.Tensor  # [R] integers, verified nodes, a tree's first ones; 0: skip the request
    accepted: torch.Tensor  # [R] int32, draft nodes on the accepted path
    # [R, D+1] int64, node at each position of that path; 0, the root, first and beyond the end.
    path: torch.Tensor
    score: torch.Tensor  # [S, N] fp32, cumulative draft log-scores of the nodes
    # [S, N] uint8, the drafters of each node, bit 0 the first, bit 1 the second; 0: no draft of
    # ours, such as a placeholder of the scheduler.
    origin: torch.Tensor
    temperatures: torch.Tensor  # [S] fp32; 0: greedy


@constexpr_function
def requests_at_once(num_nodes: int) -> int:
    """Return how many requests a program looks at together: 2,048 nodes, or one request."""
    return max(1, 2048 // next_power_of_2(num_nodes))


@jit
def authors_of(
    result,  # VerificationResult
    strides,  # VerificationResult, their strides
    request,  # [BLOCK] of the R requests, or beyond
    num_requests,  # R
    NUM_NODES: tl.constexpr,  # N
    PLACES: tl.constexpr,  # D + 1
):
    """Return the slots of some requests, and the drafters of their nodes.

    [BLOCK] int64; [BLOCK, ≥ N] of verified nodes, in tree order; [BLOCK, ≥ D + 1] of the nodes on
    the accepted path, by depth; 0: none.
    """
    there = request < num_requests
    slot = tl.load(result.req_idx + request * strides.req_idx, mask=there, other=0).to(tl.int64)
    run = tl.load(result.num_run + request * strides.num_run, mask=there, other=0)
    # Verified nodes are nodes of the tree: at most N are scheduled.
    run = tl.minimum(run, NUM_NODES)[:, None]
    tree = result.origin + (slot * NUM_NODES)[:, None]
    node = tl.arange(0, next_power_of_2(NUM_NODES))[None, :]
    verified = tl.load(tree + node, mask=node < run, other=0)
    # The root, 0, also fills the path beyond its end.
    place = tl.arange(0, next_power_of_2(PLACES))[None, :]
    path = result.path + (request * strides.path)[:, None] + place
    step = tl.load(path, mask=there[:, None] & (place < PLACES), other=0)
    return slot, verified, tl.load(tree + step - 1, mask=(step > 0) & (step <= run), other=0)
