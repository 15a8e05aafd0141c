"""A request's tree as it is, the part of kernels that make new trees of given ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, next_power_of_2, tl


class Copies(NamedTuple):
    """What a kernel takes that makes new trees of R given ones.

    Attributes:
        arguments: token, parent, depth, logprob, origin, ancestors; their strides by request; that
            of ancestors by node; size and its stride; the new ones of all seven, in this order.
        constants: NUM_NODES, NODES and W, see `copy_tree`.
        made: the new ones: token, parent, depth, logprob, size, ancestors, origin; contiguous.
    """

    arguments: tuple[torch.Tensor | int, ...]
    constants: dict[str, int]
    made: tuple[torch.Tensor, ...]

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
        nodes = (token, parent, depth, logprob, origin, ancestors)
        given = [x if x.stride(-1) == 1 else x.contiguous() for x in nodes]
        new = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*given, size)]
        strides = [x.stride(0) for x in given]
        count, words = token.shape[1], ancestors.shape[2]
        constants = {"NUM_NODES": count, "NODES": next_power_of_2(count + 1), "W": words}
        arguments: tuple[torch.Tensor | int, ...] = (
            *given,
            *strides,
            given[-1].stride(1),
            size,
            size.stride(0),
            *new,
        )
        *plain, new_origin, new_ancestors, new_size = new
        return cls(arguments, constants, (*plain, new_size, new_ancestors, new_origin))


@jit
def copy_tree(
    last,
    token, parent, depth, logprob, origin, ancestors, node_stride,
    new_token, new_parent, new_depth, new_logprob, new_origin, new_ancestors,
    NUM_NODES: tl.constexpr, NODES: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One request's tree, all but its size, where last is NUM_NODES; an empty one where it is −1.

    Every pointer is to the first entry of the request: of node 1, but of ancestors the root. origin
    may be None. NODES covers the root and all nodes, each of which has W words.
    """
    entry = tl.arange(0, NODES)
    stored, copied = entry < NUM_NODES, entry < last
    # Where there is no node, it is token 0, and hangs from the root.
    value = tl.load(token + entry, mask=copied, other=0)
    tl.store(new_token + entry, value, mask=stored)
    value = tl.load(parent + entry, mask=copied, other=-1)
    tl.store(new_parent + entry, value, mask=stored)
    value = tl.load(depth + entry, mask=copied, other=1)
    tl.store(new_depth + entry, value, mask=stored)
    value = tl.load(logprob + entry, mask=copied, other=float("-inf"))
    tl.store(new_logprob + entry, value, mask=stored)
    if origin is not None:
        value = tl.load(origin + entry, mask=copied, other=0)
        tl.store(new_origin + entry, value, mask=stored)
    node = tl.arange(0, NODES)
    # 1 << 63 is the sign bit.
    own = tl.full([NODES], 1, tl.int64) << (node % 64).to(tl.int64)
    for word in tl.static_range(W):
        at = ancestors + node * node_stride + word
        value = tl.load(at, mask=node <= last, other=0)
        alone = tl.where(node // 64 == word, own, 0) | (word == 0)
        value = tl.where(last >= 0, value, alone)
        tl.store(new_ancestors + node * W + word, value, mask=node <= NUM_NODES)
