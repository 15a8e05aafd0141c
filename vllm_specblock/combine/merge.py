"""Merging: the nodes of two trees under the root that they share (merged-tree paper, §3 and §4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from vllm_specblock.candidates import tree_of
from vllm_specblock.tree import DraftTree, check_budget
from vllm_specblock.triton_kernels.tree import merge_trees_numba
from vllm_specblock.triton_kernels.tree.merge_trees import merge_trees_triton


def merge(
    first: DraftTree,
    second: DraftTree,
    how: Literal["disjoint", "trie"],
    num_nodes: int,
    max_depth: int | None = None,
) -> tuple[DraftTree, torch.Tensor]:
    """Return one tree of the best nodes of both trees.

    "disjoint", as in the paper: the subtrees share the root only. "trie": equal texts are one
    node with the better score and the children of both. It accepts the same tokens with fewer
    nodes.

    Args:
        first, second: R trees; their numbers of node slots may differ.
        num_nodes: N, nodes of the merged tree; the best of both are kept.
        max_depth: longest path, if known; saves steps.

    Returns:
        the trees, and [R] bool: `agreement` of the two drafters.
    """
    check_budget(num_nodes)
    if max_depth is None:
        max_depth = max(first.token.shape[1], second.token.shape[1])
    loop = merge_trees_numba.merge_trees_numba
    launch = merge_trees_triton if first.token.is_cuda else loop
    made, origin, agreed = launch(first, second, how == "trie", num_nodes, max_depth)
    return replace(tree_of(made), origin=origin), agreed
