"""Combination of two drafters' trees.

Routing verifies the tree of the more confident drafter (dual-draft routing paper, §4 and §5);
merging, the nodes of both under the root that they share (merged-tree paper, §3 and §4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from vllm_specblock.candidates import NEVER, select, with_root
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.candidate_keys import PATH_FACTOR
from vllm_specblock.triton_kernels.tree.merge_trees import merge_trees_triton

Confidence = Literal["mean", "sum"]
Join = Literal["disjoint", "trie"]


def confidence(tree: DraftTree, how: Confidence) -> torch.Tensor:
    """Return a drafter's confidence in its tree [R] fp32; 0 for an empty tree.

    "mean" is the paper's μ, the mean of exp(logprob) over the nodes. "sum" is their sum, the
    number of tokens that the drafter expects to be accepted.
    """
    total = tree.logprob.exp().sum(1)  # exp(−inf) = 0: slots not in use add nothing
    return total if how == "sum" else total / tree.size.clamp(min=1)


def route(first: DraftTree, second: DraftTree, how: Confidence) -> tuple[DraftTree, torch.Tensor]:
    """Return the more confident drafter's tree per request, and `agreement`.

    Drafter 1 is chosen if both are equally confident.
    """
    surer = confidence(second, how) > confidence(first, how)
    # Also compare sizes: a very low confidence rounds to 0, but beats an empty tree.
    chosen = (second.size > 0) & (surer | (first.size == 0))
    trees = first.where(chosen, replace(second, origin=2 * second.origins()))
    return trees, agreement(first, second)


def agreement(first: DraftTree, second: DraftTree) -> torch.Tensor:
    """Return [R] bool: both trees have nodes, and their best first tokens are equal.

    Node 1, the best node of a tree, is a child of the root.
    """
    return (first.size > 0) & (second.size > 0) & (first.token[:, 0] == second.token[:, 0])


def merge_by(
    launch: Callable[..., Any], first: DraftTree, second: DraftTree, how: Join, *sizes: int
) -> tuple[DraftTree, torch.Tensor]:
    """As `merge`, by `merge_trees_triton` or a function like it."""
    made, origin, agreed = launch(first, second, how == "trie", *sizes)
    return replace(DraftTree(*made[:-1]), origin=origin), agreed


@op(partial(merge_by, merge_trees_triton))
def merge(
    first: DraftTree, second: DraftTree, how: Join, num_nodes: int, max_depth: int
) -> tuple[DraftTree, torch.Tensor]:
    """Return one tree of the best nodes of both trees.

    "disjoint", as in the paper: the subtrees share the root only. "trie": equal texts are one
    node with the better score and the children of both. It accepts the same tokens with fewer
    nodes.

    Args:
        first, second: R trees; their numbers of node slots may differ.
        num_nodes: N, nodes of the merged tree; the best of both are kept.
        max_depth: no path is longer.

    Returns:
        the trees, and [R] bool: `agreement` of the two drafters.
    """
    ours, trees = first.token.shape[1], (first, second)
    fields = ("token", "logprob", "depth")
    token, score, depth = (torch.cat([getattr(x, y) for x in trees], 1) for y in fields)
    # The paper's indices (§4.1): φ(0) = 0, and φ(i) = n₁ + i in the second tree.
    moved = torch.where(second.parent > 0, second.parent + ours, 0)
    parent = torch.cat([first.parent.clamp(min=0), moved], 1).long()
    texts = None
    if how == "trie":  # a hash per text: a polynomial of the tokens on a node's path
        factor = torch.full((max_depth + 1,), PATH_FACTOR, device=token.device).cumprod(0)
        term = (token + 1) * factor[depth.clamp(max=max_depth)]
        terms = zip(trees, term[:, None].split([ours, second.token.shape[1]], 2))
        texts = torch.cat([(x.ancestor_mask()[:, 1:, 1:] * y).sum(-1) for x, y in terms], 1)
    candidates = with_root(token, parent, score, depth.long(), texts)
    tree, node = select(candidates, num_nodes, max_depth)
    # Candidates that are no node go to a first or a last column, which are cut off.
    place = torch.where(score > NEVER, node[:, 1:], 0).clamp(max=num_nodes + 1)
    none = torch.zeros(len(place), num_nodes + 2, dtype=torch.uint8, device=place.device)
    origin = none.scatter(1, place[:, :ours], 1) | none.scatter(1, place[:, ours:], 2)
    return replace(tree, origin=origin[:, 1:-1]), agreement(first, second)
