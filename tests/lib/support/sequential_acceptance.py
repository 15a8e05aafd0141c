"""The papers' rule for one tree: accept, or reject and renormalise (routing paper, §6.2).

Plain loops over probabilities; here to be compared with `walk`, not to be served.
"""

from __future__ import annotations

import torch


def accept_sequentially(
    children: dict[int, list[tuple[int, int]]],
    target_probs: torch.Tensor,
    generator: torch.Generator,
) -> list[int]:
    """Tokens that the sequential rule commits: an accepted path, then a bonus token.

    At every node the distinct child tokens are tried in order: one is accepted with the
    probability that is left to it; rejected, it loses that probability and the rest is
    renormalised. When all are rejected the bonus is drawn from what is left. Nodes of equal
    text (two drafters drafted the same) are followed together: of all candidates the best counts.

    Args:
        children: node → its children as (node, token); 0 is the root.
        target_probs: [nodes + 1, V] float64, the target's distribution at every node; nodes of
            equal text have equal rows.
    """
    twins, committed = [0], []
    while True:
        drafted: dict[int, list[int]] = {}
        for node in twins:
            for child, token in children.get(node, []):
                drafted.setdefault(token, []).append(child)
        left, moved = target_probs[twins[0]].clone(), False
        for token, nodes in drafted.items():
            if torch.rand((), generator=generator, dtype=torch.float64) < left[token]:
                committed.append(token)
                twins, moved = nodes, True
                break
            left[token] = 0
            left /= left.sum()
        if not moved:
            committed.append(int(torch.multinomial(left, 1, generator=generator)))
            return committed
