"""The tree of the surer head, request by request, in one launch.

The torch references are `route` and `agreement` in `vllm_specblock/combine/route.py`. Sums of
probabilities are taken in another order: heads that are equally sure up to rounding may be told
apart, but equal trees never are.
"""

from __future__ import annotations

import torch

from .optional_triton import jit, next_power_of_2, tl


def choose_tree_triton(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], mean: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """New trees, and where they are from.

    Args:
        first, second: what DraftTrees of N node slots hold, by name; contiguous.
        mean: the surer tree is the one whose nodes are, or else the one with the larger sum.

    Returns:
        the trees, by name; origin [R, N] uint8; [R] bool, the second head's was chosen; [R] bool,
        both heads drafted something and name the same first token.
    """
    fields = ("token", "parent", "depth", "logprob", "size", "ancestors")
    made = {name: torch.empty_like(first[name]) for name in fields}
    num_requests, num_nodes = first["token"].shape
    origin = torch.empty_like(first["token"], dtype=torch.uint8)
    chosen, agreed = (torch.empty_like(first["size"], dtype=torch.bool) for _ in range(2))
    cells = (num_nodes + 1) * first["ancestors"].shape[2]
    if num_requests:
        _choose_kernel[(num_requests,)](
            *(tree[name].contiguous() for tree in (first, second) for name in fields),
            *made.values(), origin, chosen, agreed, MEAN=mean, NUM_NODES=num_nodes,
            NODES=next_power_of_2(num_nodes), CELLS=cells, WORDS=next_power_of_2(cells),
            num_warps=4,
        )  # fmt: skip
    return made, origin, chosen, agreed


@jit
def _copy(
    request, token, parent, depth, logprob, size, ancestors,
    new_token, new_parent, new_depth, new_logprob, new_size, new_ancestors, origin,
    HEAD: tl.constexpr, NUM_NODES: tl.constexpr, NODES: tl.constexpr, CELLS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One request's tree, as the one of head HEAD."""
    node = tl.arange(0, NODES)
    stored = node < NUM_NODES
    at = request * NUM_NODES + node
    above = tl.load(parent + at, mask=stored, other=-1)
    tl.store(new_parent + at, above, mask=stored)
    tl.store(origin + at, tl.where(above >= 0, HEAD, 0).to(tl.uint8), mask=stored)
    tl.store(new_token + at, tl.load(token + at, mask=stored, other=0), mask=stored)
    tl.store(new_depth + at, tl.load(depth + at, mask=stored, other=0), mask=stored)
    tl.store(new_logprob + at, tl.load(logprob + at, mask=stored, other=0.0), mask=stored)
    tl.store(new_size + request, tl.load(size + request))
    word = tl.arange(0, WORDS)
    at = request * CELLS + word
    words = tl.load(ancestors + at, mask=word < CELLS, other=0)
    tl.store(new_ancestors + at, words, mask=word < CELLS)


@jit
def _sure(logprob, size, request, MEAN: tl.constexpr, NUM_NODES: tl.constexpr,
          NODES: tl.constexpr):  # fmt: skip
    """`route.confidence` of one tree, fp32."""
    node = tl.arange(0, NODES)
    at = logprob + request * NUM_NODES + node
    total = tl.sum(tl.exp(tl.load(at, mask=node < NUM_NODES, other=float("-inf"))), 0)
    if MEAN:
        total = total / tl.maximum(tl.load(size + request), 1).to(tl.float32)
    return total


@jit
def _choose_kernel(
    token, parent, depth, logprob, size, ancestors,  # the first head's, contiguous
    token2, parent2, depth2, logprob2, size2, ancestors2,  # the second head's
    new_token, new_parent, new_depth, new_logprob, new_size, new_ancestors,
    origin,  # [R, NUM_NODES] uint8
    chosen, agreed,  # [R] bool
    MEAN: tl.constexpr, NUM_NODES: tl.constexpr, NODES: tl.constexpr, CELLS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One request. NODES covers its nodes, WORDS the CELLS words of its root and nodes."""
    request = tl.program_id(0).to(tl.int64)
    sure = _sure(logprob, size, request, MEAN, NUM_NODES, NODES)
    other = _sure(logprob2, size2, request, MEAN, NUM_NODES, NODES)
    drafted, drafted2 = tl.load(size + request) > 0, tl.load(size2 + request) > 0
    # What is very unsure rounds to 0, but is more than nothing.
    takes = drafted2 & ((other > sure) | (drafted == 0))
    same = tl.load(token + request * NUM_NODES) == tl.load(token2 + request * NUM_NODES)
    tl.store(chosen + request, takes)
    tl.store(agreed + request, drafted & drafted2 & same)
    if takes:
        _copy(
            request, token2, parent2, depth2, logprob2, size2, ancestors2,
            new_token, new_parent, new_depth, new_logprob, new_size, new_ancestors, origin,
            2, NUM_NODES, NODES, CELLS, WORDS,
        )  # fmt: skip
    else:
        _copy(
            request, token, parent, depth, logprob, size, ancestors,
            new_token, new_parent, new_depth, new_logprob, new_size, new_ancestors, origin,
            1, NUM_NODES, NODES, CELLS, WORDS,
        )  # fmt: skip
