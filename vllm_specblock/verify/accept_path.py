"""Accepted path: one draw of the target at every node, then a walk from the root.

From the root, move to the child whose token is the draw z; the first z without such a child is the
bonus token. Trees are a function of the past, so this has the distribution of the papers' accept /
reject-and-renormalise rule: a child c is entered with probability p(c), the next c' with
(1 − p(c)) · p(c') / (1 − p(c)) = p(c'), and the rest is the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_specblock.tree import pack_bits, unpack_bits
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows, accept_path_triton


class AcceptedPaths(NamedTuple):
    """Accepted paths of R trees, of at most D nodes."""

    path: torch.Tensor  # [R, D+1] int64, nodes; 0 (the root) first and beyond the end
    accepted: torch.Tensor  # [R] int32, draft nodes on the path
    output: torch.Tensor  # [R, D+1] int64, accepted tokens, then the bonus token; 0 beyond


def accept_path(
    token: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    live: torch.Tensor,
    sampled: torch.Tensor,
    max_depth: int,
) -> AcceptedPaths:
    """Follow the draws through R trees at once, without a loop over depth or nodes.

    A node matches if its parent drew its token, and is reached if all its ancestors match. The
    path ends at the first of the deepest reached nodes, since siblings may be duplicates.

    Args:
        token, parent: as in `DraftTree`.
        depth, ancestors: as in `KeptTrees`, of R requests.
        live: [R, N] bool, nodes that the target ran on and that may be accepted.
        sampled: [R, N+1] int64, z of the root and of every node.
        max_depth: D; deeper nodes, which only placeholder drafts have, are not accepted.
    """
    num_nodes = token.shape[1]
    wanted = sampled.gather(1, parent.clamp(min=0).long())
    matches = live & (parent >= 0) & (token == wanted) & (depth[:, 1:] <= max_depth)
    matches = torch.nn.functional.pad(matches, (1, 0), value=True)  # the root
    missing = ancestors & ~pack_bits(matches)[:, None]
    reached = (missing == 0).all(-1)

    node = torch.arange(num_nodes + 1, device=token.device)
    rank = depth * (num_nodes + 1) + num_nodes - node
    end = torch.where(reached, rank, -1).argmax(1, keepdim=True)  # [R, 1]
    accepted = depth.gather(1, end)
    on_path = unpack_bits(
        ancestors.gather(1, end[..., None].expand(-1, 1, ancestors.shape[-1]))[:, 0],
        num_nodes + 1,
    )
    # Nodes of one path differ in depth; other nodes go to a column that is cut off.
    column = torch.where(on_path, depth, max_depth + 1)
    path = token.new_zeros(len(token), max_depth + 2)
    path = path.scatter_(1, column, node.expand_as(column))[:, : max_depth + 1]
    output = sampled.gather(1, path)
    place = torch.arange(max_depth + 1, device=token.device)
    return AcceptedPaths(path, accepted[:, 0].int(), torch.where(place <= accepted, output, 0))


@op(accept_path_triton)
def accept_path_rows(rows: DrawnRows, trees: KeptTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `accept_path` on stored trees; writes `path` and `accepted` of the batch's slots.

    Returns:
        output: [R, D+1] int64, as in `AcceptedPaths`.
        num_sampled: [R] int32, number of valid tokens in it.
    """
    req_idx = rows.req_idx
    node = torch.arange(trees.depth.shape[1], device=trees.depth.device)
    at = rows.first_row[:-1, None].long() + node  # [R, N+1]
    live = at < rows.first_row[1:, None]
    at = at.clamp(max=len(rows.drawn) - 1)
    live = live & (rows.token[at] >= 0)
    found = accept_path(
        rows.token[at][:, 1:].long(),
        trees.parent[req_idx],
        trees.depth[req_idx],
        trees.ancestors[req_idx],
        live[:, 1:],
        rows.drawn[at],
        trees.path.shape[1] - 1,
    )
    trees.path[req_idx], trees.accepted[req_idx] = found.path, found.accepted
    return found.output, found.accepted + 1
