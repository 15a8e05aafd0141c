"""The tree of the surer drafter, request by request, in one launch.

The torch references are `route` and `agreement` in `vllm_specblock/combine/route.py`. Sums of
probabilities are taken in another order: drafters that are equally sure up to rounding may be told
apart, but equal trees never are.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, next_power_of_2, tl
from .copy_tree import copy_tree


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
    fields = ("token", "parent", "depth", "logprob", "size", "ancestors")
    made = {name: torch.empty_like(first[name]) for name in fields}
    num_requests, num_nodes = first["token"].shape
    words = first["ancestors"].shape[2]
    origin = torch.empty_like(first["token"], dtype=torch.uint8)
    chosen, agreed = (torch.empty_like(first["size"], dtype=torch.bool) for _ in range(2))
    if num_requests:
        _choose_kernel[(num_requests,)](
            *(tree[name].contiguous() for tree in (first, second) for name in fields),
            *made.values(), origin, chosen, agreed, MEAN=mean, NUM_NODES=num_nodes,
            NODES=next_power_of_2(num_nodes + 1), W=words, num_warps=4,
        )  # fmt: skip
    return made, origin, chosen, agreed


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
    token, parent, depth, logprob, size, ancestors,  # the first drafter's, contiguous
    token2, parent2, depth2, logprob2, size2, ancestors2,  # the second drafter's
    new_token, new_parent, new_depth, new_logprob, new_size, new_ancestors,
    origin,  # [R, NUM_NODES] uint8
    chosen, agreed,  # [R] bool
    MEAN: tl.constexpr, NUM_NODES: tl.constexpr, NODES: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One request. NODES covers the root and all nodes."""
    request = tl.program_id(0).to(tl.int64)
    row = request * NUM_NODES
    words = request * (NUM_NODES + 1) * W
    drafted, drafted2 = tl.load(size + request), tl.load(size2 + request)
    sure = _sure(logprob + row, drafted, MEAN, NUM_NODES, NODES)
    other = _sure(logprob2 + row, drafted2, MEAN, NUM_NODES, NODES)
    # What is very unsure rounds to 0, but is more than nothing.
    takes = (drafted2 > 0) & ((other > sure) | (drafted == 0))
    same = tl.load(token + row) == tl.load(token2 + row)
    tl.store(chosen + request, takes)
    tl.store(agreed + request, (drafted > 0) & (drafted2 > 0) & same)
    if takes:
        copy_tree(
            NUM_NODES, token2 + row, parent2 + row, depth2 + row, logprob2 + row, None,
            ancestors2 + words, W, new_token + row, new_parent + row, new_depth + row,
            new_logprob + row, None, new_ancestors + words, NUM_NODES, NODES, W,
        )  # fmt: skip
    else:
        copy_tree(
            NUM_NODES, token + row, parent + row, depth + row, logprob + row, None,
            ancestors + words, W, new_token + row, new_parent + row, new_depth + row,
            new_logprob + row, None, new_ancestors + words, NUM_NODES, NODES, W,
        )  # fmt: skip
    count = tl.where(takes, drafted2, drafted)
    tl.store(new_size + request, count)
    entry = tl.arange(0, NODES)
    by = tl.where(entry < count, tl.where(takes, 2, 1), 0)
    tl.store(origin + row + entry, by.to(tl.uint8), mask=entry < NUM_NODES)
