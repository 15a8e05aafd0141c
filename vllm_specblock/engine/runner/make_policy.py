"""Choice of the draft policy, and each drafter's node budget."""

from __future__ import annotations

import torch

from vllm_specblock.combine.budget import shares
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.engine.runner.draft_policy import (
    DraftPolicy,
    LazilyRoutedDrafters,
    MergedDrafters,
    RoutedDrafters,
    SingleDrafter,
)
from vllm_specblock.engine.runner.skipping_merge import SkippingMergedDrafters


def drafter_budgets(options: CombineConfig | None, num_nodes: int) -> tuple[int, ...]:
    """Nodes that each drafter drafts."""
    if options is None:
        return (num_nodes,)
    return shares(num_nodes, options.head_policy, options.budget)


def make_draft_policy(
    drafters: list[Drafter],
    options: CombineConfig | None,
    num_nodes: int,
    num_slots: int,
    device: torch.device,
) -> DraftPolicy:
    """The proposer of `options`; None with a single drafter."""
    if options is None:
        return SingleDrafter(drafters[0])
    if options.head_policy == "merge" and options.skip_drafter:
        return SkippingMergedDrafters(drafters, options, num_nodes, num_slots, device)
    if options.head_policy == "merge":
        return MergedDrafters(drafters, options, num_nodes, device)
    if options.route == "lazy":
        return LazilyRoutedDrafters(drafters, options, num_slots, device)
    return RoutedDrafters(drafters, options, device)
