"""Merging: the nodes of two trees under the root that they share (merged-tree paper, §3 and §4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from vllm_specblock.candidates import NEVER, extend_hash, select_nodes, tree_of
from vllm_specblock.combine.combined import Combined
from vllm_specblock.combine.route import agreement
from vllm_specblock.tree import DraftTree, check_budget
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.candidate_keys import ROOT_HASH
from vllm_specblock.triton_kernels.tree.merge_trees import merge_trees_triton


def union(first: DraftTree, second: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """Both trees side by side, with the paper's indices: φ(0) = 0, φ(i) = n₁ + i (§4.1).

    n₁ is the number of the first tree's node slots, in use or not, so that it is the same for
    every request.

    Args:
        first, second: R trees of n₁ and of n₂ node slots.

    Returns:
        token: [R, n₁ + n₂] int64.
        parent: [R, n₁ + n₂] int32; −1 for slots not in use, which may lie in between.
    """
    shift = first.token.shape[1]
    moved = torch.where(second.parent > 0, second.parent + shift, second.parent)
    return torch.cat([first.token, second.token], 1), torch.cat([first.parent, moved], 1)


def path_hashes(token: torch.Tensor, parent: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Hash of the text from the root to every node: what `extend_hash` gives token by token.

    Found by pointer doubling. `extend_hash` is token + F · hash, so hashes of neighbouring
    stretches join as lower + F^length · upper. After step s a node knows the last 2^s tokens
    of its path. The hash of what lies beyond the root is 0.

    Args:
        token: [R, C] int64.
        parent: [R, C] int, 0 for the root, else 1 + the parent's entry; −1: not in use.
        max_depth: no path is longer.

    Returns:
        [R, C] int64; of slots not in use it says nothing.
    """
    # The root's own hash counts once per path, in its topmost node.
    above = (parent == 0) * ROOT_HASH
    path = torch.nn.functional.pad(extend_hash(above, token), (1, 0))  # [R, C+1]
    jump = torch.nn.functional.pad(parent.clamp(min=0).long(), (1, 0))
    one = token.new_ones(())
    factor = extend_hash(one, one - one)  # F
    for step in range(max(0, max_depth - 1).bit_length()):
        if step:
            jump = jump.gather(1, jump)
            factor = factor * factor
        path = torch.addcmul(path, factor, path.gather(1, jump))
    return path[:, 1:]


def merge_by(launch: Callable[..., Any]) -> Callable[..., tuple[Combined, torch.Tensor]]:
    """Return `merge` by a launch on trees' tensors, such as `merge_trees_triton`."""

    def run(
        first: DraftTree,
        second: DraftTree,
        how: Literal["disjoint", "trie"],
        num_nodes: int,
        max_depth: int | None = None,
    ) -> tuple[Combined, torch.Tensor]:
        if max_depth is None:
            max_depth = max(first.token.shape[1], second.token.shape[1])
        trees = vars(first), vars(second)
        made, origin, agreed = launch(*trees, how == "trie", num_nodes, max_depth)
        return Combined(tree_of(made), origin), agreed

    return run


@op(merge_by(merge_trees_triton))
def merge(
    first: DraftTree,
    second: DraftTree,
    how: Literal["disjoint", "trie"],
    num_nodes: int,
    max_depth: int | None = None,
) -> tuple[Combined, torch.Tensor]:
    """The best nodes of both trees as one tree, in the order of every `DraftTree`.

    "disjoint" is the paper's: the subtrees share the root only. "trie" joins what both drafters
    say, equal texts being one node: the better score stands, and the children of both hang from
    it. That accepts what "disjoint" accepts, for fewer nodes.

    Args:
        first, second: R trees; their numbers of node slots may differ.
        num_nodes: N, nodes of the merged tree; the best of both are kept.
        max_depth: no path is longer, if known: fewer steps to find ancestors and equal texts.

    Returns:
        the trees, and [R] bool: `agreement` of the two drafters.
    """
    check_budget(num_nodes)
    if max_depth is None:
        max_depth = max(first.token.shape[1], second.token.shape[1])
    token, parent = union(first, second)
    score = torch.cat([first.logprob, second.logprob], 1)
    depth = torch.cat([first.depth, second.depth], 1).long()
    path_hash = path_hashes(token, parent, max_depth) if how == "trie" else None
    selection = select_nodes(
        token, parent.clamp(min=0).long(), score, depth, path_hash, num_nodes, max_depth
    )
    # Nodes that are not in use, and those over the budget, mark columns that are cut off.
    node = torch.where(score > NEVER, selection.node[:, 1:].clamp(max=num_nodes + 1), 0)
    origin = torch.zeros(len(token), num_nodes + 2, dtype=torch.uint8, device=token.device)
    shift = first.token.shape[1]
    ones = origin.scatter(1, node[:, :shift], 1)
    twos = origin.scatter(1, node[:, shift:], 2)
    combined = Combined(selection.tree, (ones | twos)[:, 1:-1])
    return combined, agreement(first, second)
