"""Draft policies: which drafters draft, and how their trees are combined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_specblock.combine.merge import merge
from vllm_specblock.combine.route import route
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.missed_rows import CacheHoles
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class Proposal:
    """The trees of a step.

    Attributes:
        tree: R trees of N slots.
        drafted: per drafter [R] int32, nodes of its own tree; 0 where it did not draft.
        second: [R] bool, the second drafter drafted; None with one drafter.
        agreed: [R] bool, both drafted and name the same first token; None with one drafter.
    """

    tree: DraftTree
    drafted: tuple[torch.Tensor, ...]
    second: torch.Tensor | None
    agreed: torch.Tensor | None


class DraftPolicy(ABC):
    """Runs the drafters of an engine, once per step.

    All advance in every step (routing paper, §7), except in `skipping_merge.py`.

    Attributes:
        wanted: [n] int64, requests of this step that get drafts; None: all.
        holes: set if the policy masks cache blocks itself; None: block tables are masked already.
        asked: a drafter with weights took part in the last proposal, or there is none.
        read: rows that it had missed in earlier proposals.
    """

    drafters: list[Drafter]
    wanted: torch.Tensor | None = None
    holes: CacheHoles | None = None
    asked, read = True, 0

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path of any tree."""
        return max(drafter.max_depth for drafter in self.drafters)

    def learn(self, verified: VerifiedTrees) -> None:
        """Learn from the verified trees."""
        for index, drafter in enumerate(self.drafters):
            if drafter.calibration is not None:
                drafter.beta = drafter.calibration.learn_from(verified, index)

    def forget(self) -> None:
        """Reset everything learned."""
        for drafter in self.drafters:
            if drafter.calibration is not None:
                drafter.calibration.forget()

    def begin(self, req_idx: int) -> None:
        """Reset what was learned in slot `req_idx`."""
        for drafter in self.drafters:
            if drafter.calibration is not None:
                drafter.calibration.begin(req_idx)

    def advance(self, rows: CommittedTokens) -> None:
        """Advance all drafters over the committed rows."""
        for drafter in self.drafters:
            drafter.advance(rows)

    def draft(self, drafter: Drafter, rows: CommittedTokens) -> DraftTree:
        """Return the trees of one drafter, empty for requests without drafts."""
        if self.wanted is None:
            return drafter.draft()
        trees = DraftTree.empty(len(rows.last), drafter.num_nodes, rows.last.device)
        return trees.put(self.wanted, drafter.draft(self.wanted))

    @abstractmethod
    def combine(self, rows: CommittedTokens) -> Proposal:
        """Return one tree per request, after `advance`."""


class SingleDrafter(DraftPolicy):
    def __init__(self, drafter: Drafter) -> None:
        self.drafters = [drafter]

    def combine(self, rows: CommittedTokens) -> Proposal:
        tree = self.draft(self.drafters[0], rows)
        return Proposal(tree, (tree.size,), None, None)


class TwoDrafters(DraftPolicy):
    """Both drafters draft.

    Verified is the more confident tree (routing paper, §5), or the union of both (merged-tree
    paper).
    """

    def __init__(
        self, drafters: list[Drafter], options: CombineConfig, num_nodes: int, device: torch.device
    ) -> None:
        self.drafters, self.options, self.num_nodes = drafters, options, num_nodes
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def combine(self, rows: CommittedTokens) -> Proposal:
        return self.of_both(*(self.draft(drafter, rows) for drafter in self.drafters))

    def of_both(self, first: DraftTree, second: DraftTree) -> Proposal:
        """Return the proposal of both drafters' trees."""
        how = self.options
        if how.draft_policy == "route":
            tree, _, agreed = route(first, second, how.confidence)
        else:
            tree, agreed = merge(first, second, how.merge, self.num_nodes, self.max_depth)
        both = self.always.expand(len(first.size))
        return Proposal(tree, (first.size, second.size), both, agreed)
