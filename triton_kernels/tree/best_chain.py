"""The best path alone, as a chain, for the requests that have to verify one: in one launch.

The torch reference is `Combined.where`. Few requests ever ask for a chain, but a captured step has
to be ready for any: the others' trees are copied, so that a program either copies or searches.
Where two paths are worth the same up to rounding, either may be taken.
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
    constants = copies.constants
    if len(chain):
        _best_chain_kernel[(len(chain),)](
            chain, chain.stride(0), *copies.arguments, **constants,
            WORDS=next_power_of_2(constants["W"]), num_warps=4 if constants["NODES"] <= 128 else 8,
        )  # fmt: skip
    return copies.made


@jit
def _best_chain_kernel(
    chain,  # [R] bool or integers
    chain_stride,
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
    NUM_NODES: tl.constexpr, NODES: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One request. NODES covers the root and all nodes, WORDS their words."""
    request = tl.program_id(0).to(tl.int64)
    token += request * token_stride - 1  # node 1 is entry 0
    parent += request * parent_stride - 1
    depth += request * depth_stride - 1
    logprob += request * logprob_stride - 1
    origin += request * origin_stride - 1
    ancestors += request * ancestors_stride
    out = request * NUM_NODES - 1
    new_ancestors += request * (NUM_NODES + 1) * W
    node, word = tl.arange(0, NODES), tl.arange(0, WORDS)
    stored = (node > 0) & (node <= NUM_NODES)

    if tl.load(chain + request * chain_stride) != 0:
        # What a path is worth: the sum of the probabilities of its nodes, found by their bits.
        gain = tl.zeros([NODES], tl.float32)
        bit = tl.arange(0, 64)
        for index in tl.static_range(W):
            other = index * 64 + bit
            real = (other > 0) & (other <= NUM_NODES)
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
        tl.store(new_token + out + place, tl.load(token + node, mask=kept), mask=kept)
        tl.store(new_logprob + out + place, tl.load(logprob + node, mask=kept), mask=kept)
        tl.store(new_origin + out + place, tl.load(origin + node, mask=kept), mask=kept)
        behind = stored & (node > length)
        tl.store(new_token + out + node, tl.full([NODES], 0, tl.int64), mask=behind)
        nothing = tl.full([NODES], float("-inf"), tl.float32)
        tl.store(new_logprob + out + node, nothing, mask=behind)
        tl.store(new_origin + out + node, tl.full([NODES], 0, tl.uint8), mask=behind)
        tl.store(new_parent + out + node, tl.where(behind, -1, node - 1), mask=stored)
        # Slots not in use hang from the root.
        tl.store(new_depth + out + node, tl.where(behind, 1, node), mask=stored)
        tl.store(new_size + request, length)
        # How many of a word's bits are up to the node itself, and its own, the last of them.
        # A shift of 64 would be undefined, and 1 << 63 is the sign bit.
        count = node[:, None] - word[None, :] * 64 + 1
        own = tl.full([NODES, WORDS], 1, tl.int64) << ((count - 1) & 63).to(tl.int64)
        path = tl.where(count > 64, -1, tl.where(count > 0, own | (own - 1), 0))
        alone = tl.where((count > 0) & (count <= 64), own, 0)
        alone = tl.where((word == 0)[None, :], alone | 1, alone)
        path = tl.where((node > length)[:, None], alone, path)
        row = (node <= NUM_NODES)[:, None] & (word < W)[None, :]
        tl.store(new_ancestors + node[:, None] * W + word[None, :], path, mask=row)
    else:
        first = out + 1
        copy_tree(
            NUM_NODES, token + 1, parent + 1, depth + 1, logprob + 1, origin + 1, ancestors,
            node_stride, new_token + first, new_parent + first, new_depth + first,
            new_logprob + first, new_origin + first, new_ancestors, NUM_NODES, NODES, W,
        )  # fmt: skip
        tl.store(new_size + request, tl.load(size + request * size_stride))
