"""Draft nodes of each of two drafters, for a verified tree of N nodes."""

from __future__ import annotations

from typing import Literal


def shares(
    num_nodes: int, policy: Literal["route", "merge"], budget: Literal["split", "joint"]
) -> tuple[int, int]:
    """Return (N₁, N₂), the nodes that the first and the second drafter draft.

    With routing or a joint budget, either drafter may need all N. A split budget gives each drafter
    half of them, the first one more if N is odd.

    Args:
        num_nodes: N, nodes of the verified tree.
        policy, budget: `CombineConfig.draft_policy` and `.budget`; routing ignores the budget.

    Raises:
        ValueError: a split of fewer than two nodes.
    """
    if policy == "route" or budget == "joint":
        return num_nodes, num_nodes
    if num_nodes < 2:
        raise ValueError(
            f"A budget of {num_nodes} cannot be split between two drafters, each of which needs at "
            "least one node: raise num_speculative_tokens to 2 or more, or set budget to 'joint'."
        )
    second = num_nodes // 2
    return num_nodes - second, second
