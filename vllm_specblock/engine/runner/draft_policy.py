"""Draft policies: which drafters draft, and how their trees are combined."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_specblock.combine import merge, route
from vllm_specblock.committed import CommittedTokens, MissedRows
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.engine.runner.skipped_steps import SkippedSteps
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.feedback.skip_gate import DrafterGate, first_token
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.feedback.count_step import Drafted


class DraftPolicy:
    """Runs the drafters of an engine, once per step.

    All advance in every step (routing paper, §7), except in `SkippingMergedDrafters`. Of two trees
    the more confident one is verified (routing paper, §5), or the union (merged-tree paper).

    Args:
        options: how two drafters are combined; None: there is one.
        num_nodes: N, nodes of a combined tree; max_depth: tokens on its longest path.

    Attributes:
        asked: a drafter with weights took part in the last proposal.
    """

    asked = True

    def __init__(
        self,
        drafters: list[Drafter],
        options: CombineConfig | None,
        skipped: SkippedSteps,
        num_nodes: int,
        max_depth: int,
    ) -> None:
        self.drafters, self.options, self.skipped = drafters, options, skipped
        self.num_nodes, self.max_depth = num_nodes, max_depth
        self.calibrations = [each.calibration for each in drafters if each.calibration is not None]

    def learn(self, verified: VerifiedTrees) -> None:
        for index, drafter in enumerate(self.drafters):
            if drafter.calibration is not None:
                drafter.beta = drafter.calibration.learn_from(verified, index)

    def forget(self) -> None:
        """Reset everything learned."""
        for calibration in self.calibrations:
            calibration.forget()
        for drafter in self.drafters:
            drafter.forget()

    def begin(self, req_idx: int) -> None:
        """Reset what was learned in slot `req_idx`."""
        for calibration in self.calibrations:
            calibration.begin(req_idx)

    def advance(self, rows: CommittedTokens) -> None:
        rows = self.skipped.read(rows)
        for drafter in self.drafters:
            drafter.advance(rows)

    def draft(self, live: torch.Tensor) -> tuple[DraftTree, Drafted]:
        """Return one tree per request, after `advance`, and counts of the `live` [R] requests."""
        return self.combined(live, *(drafter.draft() for drafter in self.drafters))

    def combined(self, live: torch.Tensor, *trees: DraftTree) -> tuple[DraftTree, Drafted]:
        """Return one tree of the drafters' trees."""
        if (how := self.options) is None:
            return trees[0], Drafted(live, None, None, trees[0].size, self.drafters[0].beta)
        (first, second), (one, two) = trees, self.drafters
        if how.draft_policy == "route":
            tree, agreed = route(first, second, how.confidence)
        else:
            tree, agreed = merge(first, second, how.merge, self.num_nodes, self.max_depth)
        return tree, Drafted(live, live, agreed, first.size, one.beta, second.size, two.beta)


class SkippingMergedDrafters(DraftPolicy):
    """Merged drafters; the one with weights is skipped if n-gram lookup is confident enough.

    A skipped drafter does not read the step either, since reading costs as much as drafting. Missed
    rows are kept until it drafts again. Only a CPU can decide this in every step.
    """

    def __init__(self, controller: Controller, *given: Any) -> None:
        super().__init__(*given)
        (self.lookup,) = (at for at, it in enumerate(self.drafters) if not it.cache_layers())
        self.gate, self.controller = DrafterGate(), controller
        # By request slot, for the tree under verification.
        self.both = torch.zeros_like(self.skipped.blind)
        self.sure = torch.zeros(len(self.both))

    def forget(self) -> None:
        super().forget()
        self.gate = DrafterGate()

    def learn(self, verified: VerifiedTrees) -> None:
        super().learn(verified)
        first = (verified.path[:, 1:2].long() - 1).clamp(min=0)
        author = verified.authors.gather(1, first)[:, 0] >> self.lookup
        live, req_idx = verified.live, verified.req_idx
        right = (verified.accepted > 0) & (author & 1 > 0)
        found = (self.sure[req_idx], self.both[req_idx], right, verified.accepted)
        self.gate.learn(*(x[live].numpy() for x in found))  # host tensors

    def advance(self, rows: CommittedTokens) -> None:
        lookup, drafter = self.drafters[self.lookup], self.drafters[1 - self.lookup]
        lookup.advance(rows)
        self.found, slots = lookup.draft(), rows.req_idx.tolist()  # a host tensor
        sure = first_token(self.found)
        expected = self.gate.expects(sure.numpy())  # a host tensor
        behind = self.skipped.behind(slots) + len(rows.token)
        # Dummy batches, in the last slot, measure the cost of the drafter with weights.
        dummy = slots[0] == len(self.both) - 1
        self.asked = dummy or self.controller.asks(expected, len(slots), behind)
        self.slots = rows.req_idx
        self.sure[rows.req_idx], self.both[rows.req_idx] = sure, self.asked
        if self.asked:
            drafter.advance(self.skipped.read(rows))
        else:
            self.skipped.skip(rows.kv_slot, partial(MissedRows.of, rows), wanted=True)
            self.skipped.blind[rows.req_idx] = False

    def draft(self, live: torch.Tensor) -> tuple[DraftTree, Drafted]:
        found, (one, two) = self.found, self.drafters
        if self.asked:
            tree, blind = self.drafters[1 - self.lookup].draft(), self.skipped.blind[self.slots]
            if blind.any():  # lookup needs no cache
                nothing = DraftTree.empty(len(blind), tree.token.shape[1], tree.token.device)
                tree, self.skipped.blind[self.slots] = tree.where(blind, nothing), False
            return self.combined(live, *((tree, found) if self.lookup else (found, tree)))
        never, none = torch.zeros_like(live), torch.zeros_like(found.size)
        if not self.lookup:
            return found, Drafted(live, never, never, found.size, one.beta, none, two.beta)
        found = replace(found, origin=2 * found.origins())
        return found, Drafted(live, live, never, none, one.beta, found.size, two.beta)
