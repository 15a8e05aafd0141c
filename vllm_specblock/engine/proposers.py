"""Which way of asking the heads an engine takes, and how many nodes each of them drafts."""

from __future__ import annotations

import torch

from vllm_specblock.combine.budget import shares
from vllm_specblock.config import CombineConfig
from vllm_specblock.draft.head import Head
from vllm_specblock.engine.proposal import LazyRoute, Merge, One, Proposer, Route
from vllm_specblock.engine.skipping_merge import SkippingMerge


def head_budgets(options: CombineConfig | None, num_nodes: int) -> tuple[int, ...]:
    """Nodes that each head drafts."""
    if options is None:
        return (num_nodes,)
    return shares(num_nodes, options.head_policy, options.budget)


def make_proposer(
    heads: list[Head],
    options: CombineConfig | None,
    num_nodes: int,
    num_slots: int,
    device: torch.device,
) -> Proposer:
    """The proposer of `options`; None with a single head."""
    if options is None:
        return One(heads[0])
    if options.head_policy == "merge" and options.skip_drafter:
        return SkippingMerge(heads, options, num_nodes, num_slots, device)
    if options.head_policy == "merge":
        return Merge(heads, options, num_nodes, device)
    if options.route == "lazy":
        return LazyRoute(heads, options, num_slots, device)
    return Route(heads, options, device)
