"""Draft policies: which drafters draft, and how their trees are combined."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from vllm_specblock.combine import merge, route
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.missed_rows import Backlog, CacheHoles, MissedRows
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
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
        num_nodes: N, nodes of a combined tree.

    Attributes:
        holes: set if the policy masks cache blocks itself; None: block tables are masked already.
        asked: a drafter with weights took part in the last proposal; read: rows that it had missed.
        max_depth: tokens on the longest path of any tree.
    """

    holes: CacheHoles | None = None
    asked, read = True, 0

    def __init__(
        self,
        drafters: list[Drafter],
        options: CombineConfig | None,
        num_nodes: int,
        device: torch.device,
    ) -> None:
        self.drafters, self.options, self.num_nodes = drafters, options, num_nodes
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self.calibrations = [each.calibration for each in drafters if each.calibration is not None]
        self.always = torch.ones(1, dtype=torch.bool, device=device)

    def learn(self, verified: VerifiedTrees) -> None:
        for index, drafter in enumerate(self.drafters):
            if drafter.calibration is not None:
                drafter.beta = drafter.calibration.learn_from(verified, index)

    def forget(self) -> None:
        """Reset everything learned."""
        for calibration in self.calibrations:
            calibration.forget()
        self.forget_texts()

    def forget_texts(self) -> None:
        """Forget all finished requests."""
        for drafter in self.drafters:
            drafter.forget()

    def free(self, req_idx: int) -> None:
        """Reset what was learned in slot `req_idx`."""
        for calibration in self.calibrations:
            calibration.begin(req_idx)

    def draft_briefly(self, brief: bool) -> None:
        """Let drafters draft their first block only, or all blocks."""
        for drafter in self.drafters:
            drafter.brief = brief

    def advance(self, rows: CommittedTokens) -> None:
        for drafter in self.drafters:
            drafter.advance(rows)

    def combine(self, live: torch.Tensor) -> tuple[DraftTree, Drafted]:
        """Return one tree per request, after `advance`, and counts of the `live` [R] requests."""
        trees = [drafter.draft() for drafter in self.drafters]
        if len(trees) == 2:
            return self.of_both(live, *trees)
        (tree,) = trees
        return tree, Drafted(live, None, None, tree.size, self.drafters[0].beta)

    def of_both(
        self, live: torch.Tensor, first: DraftTree, second: DraftTree
    ) -> tuple[DraftTree, Drafted]:
        """Return one tree of the drafters' trees."""
        how = self.options
        assert how is not None
        if how.draft_policy == "route":
            tree, agreed = route(first, second, how.confidence)
        else:
            tree, agreed = merge(first, second, how.merge, self.num_nodes, self.max_depth)
        both = self.always.expand(len(first.size))
        return tree, self.drafted(live, both, agreed, first.size, second.size)

    def drafted(
        self, live: torch.Tensor, second: torch.Tensor, agreed: torch.Tensor, *sizes: torch.Tensor
    ) -> Drafted:
        betas = (drafter.beta for drafter in self.drafters)
        return Drafted(live, second, agreed, *chain.from_iterable(zip(sizes, betas)))


class SkippingMergedDrafters(DraftPolicy):
    """Merged drafters; the one with weights is skipped if n-gram lookup is confident enough.

    A skipped drafter does not read the step either, since reading costs as much as drafting. Missed
    rows are kept until it drafts again. Only a CPU can decide this in every step.
    """

    def __init__(self, controller: Controller, num_slots: int, *given: Any) -> None:
        super().__init__(*given)
        (self.lookup,) = (at for at, it in enumerate(self.drafters) if not it.cache_layers())
        self.gate, self.behind, self.controller = DrafterGate(), Backlog(), controller
        self.scratch_idx = num_slots - 1
        # By request slot, for the tree under verification.
        self.sure = torch.zeros(num_slots)
        self.both = torch.zeros(num_slots, dtype=torch.bool)

    def free(self, req_idx: int) -> None:
        super().free(req_idx)
        self.behind.forget(req_idx)

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
        self.found = lookup.draft()
        sure = first_token(self.found)
        slots = rows.req_idx.numpy()  # a host tensor
        self.read = sum(map(self.behind.rows, slots.tolist()))  # a host array
        expected = self.gate.expects(sure.numpy())  # a host tensor
        behind = self.read + len(rows.token)
        # Dummy batches measure the cost of the drafter with weights.
        dummy = bool(slots[0] == self.scratch_idx)  # a host array
        self.asked = dummy or self.controller.asks(expected, len(slots), behind)
        self.sure[rows.req_idx], self.both[rows.req_idx] = sure, self.asked
        self.blind = None
        if self.asked:
            rows = self.behind.catch_up(rows)
            if self.holes is not None and self.holes.any:
                rows, self.blind = self.holes.masked(rows)
            drafter.advance(rows)
        else:
            self.behind.keep(MissedRows.of(rows), np.ones(len(slots), dtype=bool))
            if self.holes is not None:
                self.holes.skip(rows.kv_slot)

    def combine(self, live: torch.Tensor) -> tuple[DraftTree, Drafted]:
        found, drafter = self.found, self.drafters[1 - self.lookup]
        if self.asked:
            tree = drafter.draft()
            if self.blind is not None:
                nothing = DraftTree.empty(len(self.blind), tree.token.shape[1], tree.token.device)
                tree = tree.where(self.blind, nothing)
            trees = (tree, found) if self.lookup else (found, tree)
            return self.of_both(live, *trees)
        none, never = torch.zeros_like(found.size), torch.zeros_like(found.size, dtype=torch.bool)
        if not self.lookup:
            return found, self.drafted(live, never, never, found.size, none)
        found = replace(found, origin=2 * found.origins())
        return found, self.drafted(live, ~never, never, none, found.size)
