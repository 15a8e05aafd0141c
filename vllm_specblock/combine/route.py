"""Routing: verify the tree of the more confident drafter (dual-draft routing paper, §4 and §5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from vllm_specblock.tree import DraftTree

How = Literal["mean", "sum"]


def confidence(tree: DraftTree, how: How) -> torch.Tensor:
    """Return a drafter's confidence in its tree [R] fp32; 0 for an empty tree.

    "mean" is the paper's μ, the mean of exp(logprob) over the nodes. "sum" is their sum, the
    number of tokens that the drafter expects to be accepted.
    """
    total = tree.logprob.exp().sum(1)  # exp(−inf) = 0: slots not in use add nothing
    return total if how == "sum" else total / tree.size.clamp(min=1)


def route(first: DraftTree, second: DraftTree, how: How) -> tuple[DraftTree, torch.Tensor]:
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
