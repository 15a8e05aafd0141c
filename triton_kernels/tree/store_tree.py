"""What a step leaves for the next of the trees that it proposed: into their slots, in one launch.

The torch reference is `engine/runner/tree_states.py:TreeStates.store`, as six scattered writes.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl


def store_tree_triton(
    req_idx: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    logprob: torch.Tensor,
    origin: torch.Tensor,
    kept_parent: torch.Tensor,
    kept_depth: torch.Tensor,
    kept_ancestors: torch.Tensor,
    kept_score: torch.Tensor,
    kept_origin: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Launch the kernel, one program per request.

    Args:
        req_idx: [R] integers; may be a column of a table.
        parent, depth, ancestors, logprob: of R trees, as `DraftTree` has them.
        origin: [R, N] uint8, as `Combined` has it.
        kept_parent, kept_depth, kept_ancestors, kept_score, kept_origin, accepted: as `TreeStates`
            has them, contiguous; column 0 of kept_depth stays as it is.
    """
    nodes_of = (parent, depth, logprob, origin, ancestors)
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in nodes_of]
    num_requests, num_nodes = parent.shape
    words, nodes = ancestors.shape[2], next_power_of_2(num_nodes + 1)
    if num_requests:
        _store_tree_kernel[(num_requests,)](
            req_idx,
            req_idx.stride(0),
            *given,
            *(x.stride(0) for x in given),
            given[-1].stride(1),
            kept_parent,
            kept_depth,
            kept_score,
            kept_origin,
            kept_ancestors,
            accepted,
            NUM_NODES=num_nodes,
            NODES=nodes,
            W=words,
            num_warps=1 if nodes <= 64 else 4,
        )


@jit
def _store_tree_kernel(
    req_idx,  # [R]
    req_idx_stride,
    parent,  # [R, NUM_NODES] int32, as the three after it: entries of a row are consecutive
    depth,  # int32
    logprob,  # fp32
    origin,  # uint8
    ancestors,  # [R, NUM_NODES + 1, W] int64, words of a node are consecutive
    parent_stride,
    depth_stride,
    logprob_stride,
    origin_stride,
    ancestors_stride,
    node_stride,  # of ancestors
    kept_parent,  # [S, NUM_NODES] int32
    kept_depth,  # [S, NUM_NODES + 1] int64
    kept_score,  # [S, NUM_NODES] fp32
    kept_origin,  # [S, NUM_NODES] uint8
    kept_ancestors,  # [S, NUM_NODES + 1, W] int64
    accepted,  # [S] int32
    NUM_NODES: tl.constexpr,
    NODES: tl.constexpr,
    W: tl.constexpr,
):
    """One request. NODES covers the root and all nodes."""
    request = tl.program_id(0).to(tl.int64)
    req_idx = tl.load(req_idx + request * req_idx_stride).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < NUM_NODES
    to = req_idx * NUM_NODES + node
    above = tl.load(parent + request * parent_stride + node, mask=inside)
    tl.store(kept_parent + to, above, inside)
    deep = tl.load(depth + request * depth_stride + node, mask=inside, other=0).to(tl.int64)
    tl.store(kept_depth + to + req_idx + 1, deep, inside)  # every slot has a root before its nodes
    score = tl.load(logprob + request * logprob_stride + node, mask=inside)
    tl.store(kept_score + to, score, inside)
    by = tl.load(origin + request * origin_stride + node, mask=inside)
    tl.store(kept_origin + to, by, inside)
    row = node <= NUM_NODES
    for word in tl.static_range(W):
        at = ancestors + request * ancestors_stride + node * node_stride + word
        to = kept_ancestors + (req_idx * (NUM_NODES + 1) + node) * W + word
        tl.store(to, tl.load(at, mask=row), row)
    tl.store(accepted + req_idx, 0)
