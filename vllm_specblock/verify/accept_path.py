"""Accepted path: one draw of the target at every node, then a walk from the root.

From the root, move to the child whose token is the draw z; the first z without such a child is the
bonus token. Trees are a function of the past, so this has the distribution of the papers' accept /
reject-and-renormalise rule: a child c is entered with probability p(c), the next c' with
(1 − p(c)) · p(c') / (1 − p(c)) = p(c'), and the rest is the residual.
"""

from __future__ import annotations

import torch

from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits, unpack_bits
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees
from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows, accept_path_triton


@op(accept_path_triton)
def accept_path_rows(rows: DrawnRows, trees: KeptTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow the draws through R trees at once, without a loop over depth or nodes.

    A node matches if its parent drew its token, and is reached if all its ancestors match. The
    path ends at the first of the deepest reached nodes, since siblings may be duplicates. Nodes
    deeper than D, which only placeholder drafts have, are not accepted. Writes `path` and
    `accepted` of the batch's slots.

    Returns:
        output: [R, D+1] int64, accepted tokens, then the bonus token; 0 beyond.
        num_sampled: [R] int32, number of valid tokens in it.
    """
    req_idx, max_depth = rows.req_idx, trees.path.shape[1] - 1
    parent, depth, ancestors = (x[req_idx] for x in (trees.parent, trees.depth, trees.ancestors))
    num_nodes = parent.shape[1]
    node = torch.arange(num_nodes + 1, device=depth.device)
    at = rows.first_row[:-1, None].long() + node  # [R, N+1]
    live = at < rows.first_row[1:, None]
    at = at.clamp(max=len(rows.drawn) - 1)
    token, drawn = rows.token[at].long(), rows.drawn[at]
    wanted = drawn.gather(1, parent.clamp(min=0).long())
    matches = (live & (token >= 0) & (depth <= max_depth))[:, 1:]
    matches = matches & (parent >= 0) & (token[:, 1:] == wanted)
    matches = torch.nn.functional.pad(matches, (1, 0), value=True)  # the root
    missing = ancestors & ~pack_bits(matches)[:, None]
    reached = (missing == 0).all(-1)

    rank = depth * (num_nodes + 1) + num_nodes - node
    end = torch.where(reached, rank, -1).argmax(1, keepdim=True)  # [R, 1]
    accepted = depth.gather(1, end)
    words = ancestors.gather(1, end[..., None].expand(-1, 1, ancestors.shape[-1]))[:, 0]
    on_path = unpack_bits(words, num_nodes + 1)
    # Nodes of one path differ in depth; other nodes go to a column that is cut off.
    column = torch.where(on_path, depth, max_depth + 1)
    path = drawn.new_zeros(len(drawn), max_depth + 2)
    path = path.scatter_(1, column, node.expand_as(column))[:, : max_depth + 1]
    place = torch.arange(max_depth + 1, device=node.device)
    output = torch.where(place <= accepted, drawn.gather(1, path), 0)
    accepted = accepted[:, 0].int()
    trees.path[req_idx], trees.accepted[req_idx] = path, accepted
    return output, accepted + 1
