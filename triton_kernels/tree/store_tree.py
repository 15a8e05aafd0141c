"""Storage of new trees by request slot: whole, as their best path, or empty.

The reference is `engine/runner/tree_states.py:store_trees`; ties up to
rounding may differ. Each request has a flag, so that a captured step serves any requests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .select_tree import TreeTensors


class KeptTrees(NamedTuple):
    """Trees under verification of S request slots, and their accepted paths; contiguous."""

    parent: torch.Tensor  # [S, N] int32
    depth: torch.Tensor  # [S, N+1] int64
    score: torch.Tensor  # [S, N] fp32
    ancestors: torch.Tensor  # [S, N+1, W] int64
    origin: torch.Tensor  # [S, N] uint8
    accepted: torch.Tensor  # [S] int32, draft nodes on the accepted path
    path: torch.Tensor  # [S, D+1] int64, its nodes; 0 (the root) first and beyond the end


def store_trees_triton(
    req_idx: torch.Tensor,
    tree: Any,
    kept: KeptTrees,
    chain: torch.Tensor | None,
    paused: torch.Tensor | None,
    tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel; see `store_trees`; `tree`: a `DraftTree`."""
    new, origin = TreeTensors.of(tree), None if tree.origin is None else tree.origin.contiguous()
    requests, num_nodes = new.token.shape
    tokens = torch.empty_like(new.token) if tokens is None else tokens
    _store_trees_kernel[(requests,)](
        req_idx,
        req_idx.stride(0),
        chain,
        0 if chain is None else chain.stride(0),
        paused,
        new,
        origin,
        kept,
        tokens,
        NUM_NODES=num_nodes,
        num_warps=4 if num_nodes < 128 else 8,
    )
    return tokens


@jit(do_not_specialize=["req_idx_ptr", "chain_ptr"])
def _store_trees_kernel(
    req_idx_ptr,  # [R] integers
    req_idx_stride,
    chain_ptr,  # [R] bool or integers; or None
    chain_stride,
    paused_ptr,  # [S] bool; or None
    new,  # TreeTensors
    origin_ptr,  # [R, NUM_NODES] uint8; or None: one drafter
    kept,  # KeptTrees
    token_ptr,  # [R, NUM_NODES] int64
    NUM_NODES: tl.constexpr,
):
    """One request."""
    NODES: tl.constexpr = next_power_of_2(NUM_NODES + 1)  # with the root
    W: tl.constexpr = NUM_NODES // 64 + 1
    WORDS: tl.constexpr = next_power_of_2(W)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(req_idx_ptr + request * req_idx_stride).to(tl.int64)
    last = tl.where(slot >= 0, NUM_NODES, -1)  # -1: nothing is read, not even the root
    if paused_ptr is not None:
        last = tl.where(tl.load(paused_ptr + slot) != 0, -1, NUM_NODES)
    chained = slot < 0
    if chain_ptr is not None:
        chained = tl.where(last >= 0, tl.load(chain_ptr + request * chain_stride), 0) != 0
    node, word = tl.arange(0, NODES), tl.arange(0, WORDS)
    stored = (node > 0) & (node <= NUM_NODES)
    read, to = request * NUM_NODES - 1, slot * NUM_NODES - 1  # node 1 is entry 0
    ancestors = new.ancestors + request * (NUM_NODES + 1) * W
    # Unused slots are children of the root, with its bit and their own.
    own = tl.full([NODES, WORDS], 1, tl.int64) << (node % 64).to(tl.int64)[:, None]
    path = tl.where(node[:, None] // 64 == word[None, :], own, 0)
    path = tl.where((word == 0)[None, :], path | 1, path)

    if chained:
        # Value of a path: the sum of its nodes' probabilities, found by their bits.
        gain = tl.full([NODES], 0.0, tl.float32)
        bit = tl.arange(0, 64)
        for index in range(W):
            other = index * 64 + bit
            real = (other > 0) & (other <= NUM_NODES)
            chance = tl.exp(tl.load(new.logprob + read + other, mask=real, other=float("-inf")))
            bits = tl.load(ancestors + node * W + index, mask=stored, other=0)
            ahead = (bits[:, None] >> bit.to(tl.int64)[None, :]) & 1
            gain += tl.sum(tl.where(ahead > 0, chance[None, :], 0.0), 1)
        used = tl.load(new.parent + read + node, mask=stored, other=-1) >= 0
        # The root, where there is no node at all.
        end = tl.argmax(tl.where(used, gain, float("-inf")), 0)

        bits = tl.load(ancestors + end * W + node // 64, mask=stored, other=0)
        on_path = ((bits >> (node % 64).to(tl.int64)) & 1) > 0
        # Nodes of a path ascend with their depth.
        place, length = tl.cumsum(on_path.to(tl.int32), 0), tl.sum(on_path.to(tl.int32), 0)
        value = tl.load(new.token + read + node, mask=on_path)
        tl.store(token_ptr + read + place, value, mask=on_path)
        value = tl.load(new.logprob + read + node, mask=on_path)
        tl.store(kept.score + to + place, value, mask=on_path)
        if origin_ptr is not None:
            by = tl.load(origin_ptr + read + node, mask=on_path)
            tl.store(kept.origin + to + place, by, mask=on_path)
        behind = stored & (node > length)
        tl.store(token_ptr + read + node, tl.full([NODES], 0, tl.int64), mask=behind)
        nothing = tl.full([NODES], float("-inf"), tl.float32)
        tl.store(kept.score + to + node, nothing, mask=behind)
        tl.store(kept.origin + to + node, tl.full([NODES], 0, tl.uint8), mask=behind)
        parent, depth = tl.where(behind, -1, node - 1), tl.where(behind, 1, node)
        # A word's bits up to the node, and its own, the last one.
        # A shift of 64 would be undefined, and 1 << 63 is the sign bit.
        count = node[:, None] - word[None, :] * 64 + 1
        up_to = tl.where(count > 64, -1, tl.where(count > 0, own | (own - 1), 0))
        path = tl.where((node > length)[:, None], path, up_to)
    else:
        there = (node > 0) & (node <= last)
        value = tl.load(new.token + read + node, mask=there, other=0)
        tl.store(token_ptr + read + node, value, mask=stored)
        value = tl.load(new.logprob + read + node, mask=there, other=float("-inf"))
        tl.store(kept.score + to + node, value, mask=stored)
        if origin_ptr is not None:
            by = tl.load(origin_ptr + read + node, mask=there, other=0)
            tl.store(kept.origin + to + node, by, mask=stored)
        parent = tl.load(new.parent + read + node, mask=there, other=-1)
        depth = tl.load(new.depth + read + node, mask=there, other=1)
        there = (node <= last)[:, None] & (word < W)[None, :]
        given = tl.load(ancestors + node[:, None] * W + word[None, :], mask=there, other=0)
        path = tl.where(last >= 0, given, path)
    if origin_ptr is None:
        by = (parent >= 0).to(tl.uint8)
        tl.store(kept.origin + to + node, by, mask=stored)
    tl.store(kept.parent + to + node, parent, mask=stored)
    tl.store(kept.depth + slot * (NUM_NODES + 1) + node, depth.to(tl.int64), mask=stored)
    row = (node <= NUM_NODES)[:, None] & (word < W)[None, :]
    to_words = kept.ancestors + slot * (NUM_NODES + 1) * W + node[:, None] * W + word[None, :]
    tl.store(to_words, path, mask=row)
    tl.store(kept.accepted + slot, 0)
