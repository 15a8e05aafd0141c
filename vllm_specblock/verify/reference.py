"""The papers' rule for one tree: accept, or reject and renormalise (routing paper, §6.2).

Plain loops over probabilities; here to be compared with `walk`, not to be served.
"""

from __future__ import annotations

import torch


def accept_sequentially(
    children: dict[int, list[tuple[int, int]]],
    law: torch.Tensor,
    generator: torch.Generator,
) -> list[int]:
    """Tokens that the sequential rule commits: an accepted path, then a bonus token.

    At every node the distinct child tokens are tried in order: one is accepted with the
    probability that is left to it; rejected, it loses that probability and the rest is
    renormalised. When all are rejected the bonus is drawn from what is left.

    Args:
        children: node → its children as (node, token); 0 is the root.
        law: [nodes + 1, V] float64, the target's distribution at every node.
    """
    node, committed = 0, []
    while True:
        left, moved, tried = law[node].clone(), False, set()
        for child, token in children.get(node, []):
            if token in tried:
                continue
            tried.add(token)
            if torch.rand((), generator=generator, dtype=torch.float64) < left[token]:
                committed.append(token)
                node, moved = child, True
                break
            left[token] = 0
            left /= left.sum()
        if not moved:
            committed.append(int(torch.multinomial(left, 1, generator=generator)))
            return committed
