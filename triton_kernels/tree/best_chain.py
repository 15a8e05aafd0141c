"""The best path of a tree as a chain, for requests that verify one.

The torch reference is `Combined.where`; of paths equal up to rounding either may be taken. The
other trees are copied, so that a captured step serves any requests.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .copy_tree import Copies, copy_tree


def best_chain_triton(chain: torch.Tensor, **trees: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """New trees, and who drafted their nodes.

    Args:
        chain: [R] bool or integers, whose tree becomes its best path; may be a column of a table.
        trees: by name, as `Copies.of` takes them.

    Returns:
        token, parent, depth, logprob, size, ancestors and origin, all new and contiguous.
    """
    copies = Copies.of(**trees)
    if len(chain):
        _best_chain_kernel[(len(chain),)](
            chain,
            chain.stride(0),
            *copies,
            WORDS=next_power_of_2(copies.sizes.W),
            num_warps=4 if copies.sizes.NODES <= 128 else 8,
        )
    return copies.made


@jit
def _best_chain_kernel(
    chain_ptr,  # [R] bool or integers
    chain_stride,
    given,  # GivenTrees
    strides,  # GivenTrees
    node_stride,  # of ancestors
    made,  # GivenTrees
    TREE: tl.constexpr,  # TreeSizes
    WORDS: tl.constexpr,  # >= W
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    token = given.token + request * strides.token - 1  # node 1 is entry 0
    parent = given.parent + request * strides.parent - 1
    logprob = given.logprob + request * strides.logprob - 1
    origin = given.origin + request * strides.origin - 1
    ancestors = given.ancestors + request * strides.ancestors
    out = request * TREE.NUM_NODES - 1
    node, word = tl.arange(0, TREE.NODES), tl.arange(0, WORDS)
    stored = (node > 0) & (node <= TREE.NUM_NODES)

    if tl.load(chain_ptr + request * chain_stride) != 0:
        # What a path is worth: the sum of the probabilities of its nodes, found by their bits.
        gain = tl.full([TREE.NODES], 0.0, tl.float32)
        bit = tl.arange(0, 64)
        W: tl.constexpr = TREE.W  # see `optional_triton.py`
        for index in tl.static_range(W):
            other = index * 64 + bit
            real = (other > 0) & (other <= TREE.NUM_NODES)
            chance = tl.exp(tl.load(logprob + other, mask=real, other=float("-inf")))
            bits = tl.load(ancestors + node * node_stride + index, mask=stored, other=0)
            on_path = (bits[:, None] >> bit.to(tl.int64)[None, :]) & 1
            gain += tl.sum(tl.where(on_path > 0, chance[None, :], 0.0), 1)
        used = tl.load(parent + node, mask=stored, other=-1) >= 0
        # The root, where there is no node at all.
        end = tl.argmax(tl.where(used, gain, float("-inf")), 0)

        bits = tl.load(ancestors + end * node_stride + node // 64, mask=stored, other=0)
        kept = ((bits >> (node % 64).to(tl.int64)) & 1) > 0
        # Nodes of a path ascend with their depth.
        place = tl.cumsum(kept.to(tl.int32), 0)
        length = tl.sum(kept.to(tl.int32), 0)
        tl.store(made.token + out + place, tl.load(token + node, mask=kept), mask=kept)
        tl.store(made.logprob + out + place, tl.load(logprob + node, mask=kept), mask=kept)
        tl.store(made.origin + out + place, tl.load(origin + node, mask=kept), mask=kept)
        behind = stored & (node > length)
        tl.store(made.token + out + node, tl.full([TREE.NODES], 0, tl.int64), mask=behind)
        nothing = tl.full([TREE.NODES], float("-inf"), tl.float32)
        tl.store(made.logprob + out + node, nothing, mask=behind)
        tl.store(made.origin + out + node, tl.full([TREE.NODES], 0, tl.uint8), mask=behind)
        tl.store(made.parent + out + node, tl.where(behind, -1, node - 1), mask=stored)
        # Slots not in use hang from the root.
        tl.store(made.depth + out + node, tl.where(behind, 1, node), mask=stored)
        tl.store(made.size + request, length)
        # How many of a word's bits are up to the node itself, and its own, the last of them.
        # A shift of 64 would be undefined, and 1 << 63 is the sign bit.
        count = node[:, None] - word[None, :] * 64 + 1
        own = tl.full([TREE.NODES, WORDS], 1, tl.int64) << ((count - 1) & 63).to(tl.int64)
        path = tl.where(count > 64, -1, tl.where(count > 0, own | (own - 1), 0))
        alone = tl.where((count > 0) & (count <= 64), own, 0)
        alone = tl.where((word == 0)[None, :], alone | 1, alone)
        path = tl.where((node > length)[:, None], alone, path)
        row = (node <= TREE.NUM_NODES)[:, None] & (word < TREE.W)[None, :]
        new_ancestors = made.ancestors + request * (TREE.NUM_NODES + 1) * TREE.W
        tl.store(new_ancestors + node[:, None] * TREE.W + word[None, :], path, mask=row)
    else:
        copy_tree(TREE.NUM_NODES, given, strides, node_stride, made, request, TREE)
        tl.store(made.size + request, tl.load(given.size + request * strides.size))
