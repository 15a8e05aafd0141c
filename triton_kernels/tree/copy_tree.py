"""A request's tree as it is, the part of kernels that make new trees of given ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl


class GivenTrees(NamedTuple):
    """Trees, or their strides by request; entries of a row and words of a node are consecutive."""

    token: Any  # [R, N] int64
    parent: Any  # [R, N] int32
    depth: Any  # [R, N] int32
    logprob: Any  # [R, N] fp32
    size: Any  # [R] int32
    ancestors: Any  # [R, N+1, W] int64
    origin: Any  # [R, N] uint8


class TreeSizes(NamedTuple):
    """What `copy_tree` is compiled for."""

    NUM_NODES: int  # N
    NODES: int  # >= N + 1: the root and all nodes
    W: int

    @classmethod
    def of(cls, ancestors: torch.Tensor) -> TreeSizes:
        """ancestors: [R, N+1, W]."""
        nodes, words = ancestors.shape[1:]
        return cls(nodes - 1, next_power_of_2(nodes), words)


class Copies(NamedTuple):
    """R given trees and the new ones that a kernel makes; `node_stride` is of ancestors."""

    given: GivenTrees
    strides: GivenTrees
    node_stride: int
    made: GivenTrees
    sizes: TreeSizes

    @classmethod
    def of(
        cls,
        token: torch.Tensor,
        parent: torch.Tensor,
        depth: torch.Tensor,
        logprob: torch.Tensor,
        size: torch.Tensor,
        ancestors: torch.Tensor,
        origin: torch.Tensor,
    ) -> Copies:
        """Of trees as `DraftTree` has them, and origin [R, N] uint8, as `Combined` has it."""
        trees = (token, parent, depth, logprob, size, ancestors, origin)
        given = GivenTrees._make(
            [x if x.ndim == 1 or x.stride(-1) == 1 else x.contiguous() for x in trees]
        )
        made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
        return cls(
            given,
            GivenTrees._make([x.stride(0) for x in given]),
            given.ancestors.stride(1),
            GivenTrees._make(made),
            TreeSizes.of(ancestors),
        )


@jit
def copy_tree(
    last,
    given,  # GivenTrees
    strides,  # GivenTrees
    node_stride,
    made,  # GivenTrees
    request,  # int64
    TREE: tl.constexpr,  # TreeSizes
):
    """One request's tree, all but its size, where last is N; an empty one where it is −1."""
    entry = tl.arange(0, TREE.NODES)
    stored, copied = entry < TREE.NUM_NODES, entry < last
    out = request * TREE.NUM_NODES
    # Where there is no node, it is token 0, and hangs from the root.
    value = tl.load(given.token + request * strides.token + entry, mask=copied, other=0)
    tl.store(made.token + out + entry, value, mask=stored)
    value = tl.load(given.parent + request * strides.parent + entry, mask=copied, other=-1)
    tl.store(made.parent + out + entry, value, mask=stored)
    value = tl.load(given.depth + request * strides.depth + entry, mask=copied, other=1)
    tl.store(made.depth + out + entry, value, mask=stored)
    logprob = given.logprob + request * strides.logprob
    value = tl.load(logprob + entry, mask=copied, other=float("-inf"))
    tl.store(made.logprob + out + entry, value, mask=stored)
    value = tl.load(given.origin + request * strides.origin + entry, mask=copied, other=0)
    tl.store(made.origin + out + entry, value, mask=stored)
    node = tl.arange(0, TREE.NODES)
    ancestors = given.ancestors + request * strides.ancestors
    new_ancestors = made.ancestors + request * (TREE.NUM_NODES + 1) * TREE.W
    # 1 << 63 is the sign bit.
    own = tl.full([TREE.NODES], 1, tl.int64) << (node % 64).to(tl.int64)
    W: tl.constexpr = TREE.W  # see `optional_triton.py`
    for word in tl.static_range(W):
        at = ancestors + node * node_stride + word
        value = tl.load(at, mask=node <= last, other=0)
        alone = tl.where(node // 64 == word, own, 0) | (word == 0)
        value = tl.where(last >= 0, value, alone)
        tl.store(new_ancestors + node * TREE.W + word, value, mask=node <= TREE.NUM_NODES)
