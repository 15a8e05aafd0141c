"""The tree of the surer drafter, request by request, in one launch.

The torch references are `route` and `agreement` in `vllm_specblock/combine/route.py`. Sums of
probabilities are taken in another order: drafters that are equally sure up to rounding may be told
apart, but equal trees never are.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, tl
from .copy_tree import GivenTrees, TreeSizes, copy_tree


def choose_tree_triton(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], mean: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """New trees, and where they are from.

    Args:
        first, second: what DraftTrees of N node slots hold, by name; contiguous.
        mean: the surer tree is the one whose nodes are, or else the one with the larger sum.

    Returns:
        the trees, by name; origin [R, N] uint8; [R] bool, the second drafter's was chosen; [R]
        bool, both drafters drafted something and name the same first token.
    """
    made = {name: torch.empty_like(first[name]) for name in GivenTrees._fields if name != "origin"}
    num_requests = len(first["token"])
    origin = torch.empty_like(first["token"], dtype=torch.uint8)
    chosen, agreed = (torch.empty_like(first["size"], dtype=torch.bool) for _ in range(2))
    if num_requests:
        given = [_without_origin(tree) for tree in (first, second)]
        strides = GivenTrees(*(None if x is None else x.stride(0) for x in given[0]))
        _choose_kernel[(num_requests,)](
            *given,
            strides,
            given[0].ancestors.stride(1),
            _without_origin(made),
            origin,
            chosen,
            agreed,
            MEAN=mean,
            TREE=TreeSizes.of(first["ancestors"]),
            num_warps=4,
        )
    return made, origin, chosen, agreed


def _without_origin(tree: dict[str, torch.Tensor]) -> GivenTrees:
    """What a DraftTree holds, contiguous."""
    held = (name for name in GivenTrees._fields if name != "origin")
    return GivenTrees(**{name: tree[name].contiguous() for name in held}, origin=None)


@jit
def _sure(logprob, size, MEAN: tl.constexpr, NUM_NODES: tl.constexpr, NODES: tl.constexpr):
    """`route.confidence` of one tree, fp32."""
    entry = tl.arange(0, NODES)
    at = logprob + entry
    total = tl.sum(tl.exp(tl.load(at, mask=entry < NUM_NODES, other=float("-inf"))), 0)
    if MEAN:
        total = total / tl.maximum(size, 1).to(tl.float32)
    return total


@jit
def _choose_kernel(
    first,  # GivenTrees, contiguous, as the second drafter's and the new ones
    second,  # GivenTrees
    strides,  # GivenTrees, of both
    node_stride,  # of ancestors
    made,  # GivenTrees
    origin,  # [R, NUM_NODES] uint8
    chosen,  # [R] bool
    agreed,  # [R] bool
    MEAN: tl.constexpr,
    TREE: tl.constexpr,  # TreeSizes
):
    """One request."""
    request = tl.program_id(0).to(tl.int64)
    row = request * TREE.NUM_NODES
    drafted, drafted2 = tl.load(first.size + request), tl.load(second.size + request)
    sure = _sure(first.logprob + row, drafted, MEAN, TREE.NUM_NODES, TREE.NODES)
    other = _sure(second.logprob + row, drafted2, MEAN, TREE.NUM_NODES, TREE.NODES)
    # What is very unsure rounds to 0, but is more than nothing.
    takes = (drafted2 > 0) & ((other > sure) | (drafted == 0))
    same = tl.load(first.token + row) == tl.load(second.token + row)
    tl.store(chosen + request, takes)
    tl.store(agreed + request, (drafted > 0) & (drafted2 > 0) & same)
    if takes:
        copy_tree(TREE.NUM_NODES, second, strides, node_stride, made, request, TREE)
    else:
        copy_tree(TREE.NUM_NODES, first, strides, node_stride, made, request, TREE)
    count = tl.where(takes, drafted2, drafted)
    tl.store(made.size + request, count)
    entry = tl.arange(0, TREE.NODES)
    by = tl.where(entry < count, tl.where(takes, 2, 1), 0)
    tl.store(origin + row + entry, by.to(tl.uint8), mask=entry < TREE.NUM_NODES)
