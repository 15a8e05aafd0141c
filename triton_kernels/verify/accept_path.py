"""Accepted path from the target's draw at every node, in one launch.

The torch reference is `vllm_specblock.verify.accept_path.accept_path_rows`. A program serves one
request: its matching nodes become bits, and a node is reached if these hold all of its ancestors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl
from ..tree.store_tree import KeptTrees


class DrawnRows(NamedTuple):
    """The target's draws for R requests, in order: each a root and its nodes."""

    token: torch.Tensor  # [rows] integers, the node's token; −1: never accepted
    drawn: torch.Tensor  # [rows] int64
    # [R+1] int32, the rows of each request: at most N + 1, fewer if not all nodes were verified.
    first_row: torch.Tensor
    req_idx: torch.Tensor  # [R] integers, the request slot


def accept_path_triton(rows: DrawnRows, trees: KeptTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `accept_path_rows`. All tensors but `rows.req_idx` are contiguous."""
    num_requests, num_nodes, places = len(rows.req_idx), trees.parent.shape[1], trees.path.shape[1]
    output = trees.path.new_empty(num_requests, places)
    num_sampled = trees.accepted.new_empty(num_requests)
    _accept_path_kernel[(num_requests,)](
        *rows,
        rows.req_idx.stride(0),
        trees,
        output,
        num_sampled,
        NUM_NODES=num_nodes,
        W=trees.ancestors.shape[2],
        PLACES=places,
        num_warps=1 if num_nodes <= 64 else 4,
    )
    return output, num_sampled


# A chunk of a batch may begin anywhere: do not specialise on alignment.
@jit(do_not_specialize=["token_ptr", "drawn_ptr", "first_row_ptr", "req_idx_ptr"])
def _accept_path_kernel(
    token_ptr,  # [rows] integers, −1: not to be accepted
    drawn_ptr,  # [rows] int64
    first_row_ptr,  # [R+1] int32
    req_idx_ptr,  # [R] integers
    req_idx_stride,
    trees,  # KeptTrees
    output_ptr,  # [R, PLACES] int64
    num_sampled_ptr,  # [R] int32
    NUM_NODES: tl.constexpr,
    W: tl.constexpr,
    PLACES: tl.constexpr,  # D + 1
):
    NODES: tl.constexpr = next_power_of_2(NUM_NODES)
    PADDED: tl.constexpr = next_power_of_2(PLACES)
    request = tl.program_id(0)
    first = tl.load(first_row_ptr + request)
    count = tl.load(first_row_ptr + request + 1) - first
    at = tl.load(req_idx_ptr + request * req_idx_stride).to(tl.int64)
    parent_ptr = trees.parent + at * NUM_NODES - 1  # node 1 is entry 0
    depth_ptr = trees.depth + at * (NUM_NODES + 1)
    ancestors_ptr = trees.ancestors + at * (NUM_NODES + 1) * W
    path_ptr = trees.path + at * PLACES
    output_ptr += request * PLACES
    node = tl.arange(0, NODES) + 1

    live = (node <= NUM_NODES) & (node < count)
    drafted = tl.load(token_ptr + first + node, mask=live, other=-1)
    up = tl.load(parent_ptr + node, mask=live, other=-1)
    level = tl.load(depth_ptr + node, mask=live, other=0).to(tl.int32)
    live = live & (drafted >= 0) & (up >= 0) & (level < PLACES)
    matches = live & (tl.load(drawn_ptr + first + up, mask=live, other=-1) == drafted)

    # Different bits: their sum is their union, and the sign bit wraps into place.
    bit = tl.full([NODES], 1, tl.int64) << (node % 64).to(tl.int64)
    reached = matches
    for w in tl.static_range(W):
        found = tl.sum(tl.where(matches & (node // 64 == w), bit, 0), 0)
        if w == 0:
            found = found | 1  # the root
        needed = tl.load(ancestors_ptr + node * W + w, mask=matches, other=0)
        reached = reached & ((needed & ~found) == 0)
    # The deepest node, of equals the first; the root has the lowest rank, NUM_NODES.
    rank = tl.where(reached, level * (NUM_NODES + 1) + NUM_NODES - node, NUM_NODES)
    best = tl.max(rank, 0)
    length = best // (NUM_NODES + 1)
    end = NUM_NODES - best % (NUM_NODES + 1)

    word = tl.load(ancestors_ptr + end * W + node // 64, mask=reached, other=0)
    on_path = reached & ((word & bit) != 0)
    place = tl.arange(0, PADDED)
    behind = (place > length) & (place < PLACES)
    tl.store(path_ptr + level, node.to(tl.int64), mask=on_path)
    tl.store(path_ptr + place, tl.zeros([PADDED], tl.int64), mask=behind | (place == 0))
    drawn = tl.load(drawn_ptr + first + node, mask=on_path, other=0)
    tl.store(output_ptr + level, drawn, mask=on_path)
    tl.store(output_ptr, tl.load(drawn_ptr + first))
    tl.store(output_ptr + place, tl.zeros([PADDED], tl.int64), mask=behind)
    tl.store(trees.accepted + at, length)
    tl.store(num_sampled_ptr + request, length + 1)
