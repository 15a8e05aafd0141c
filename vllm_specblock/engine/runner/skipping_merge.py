"""Merged drafters; the one with weights runs only where that pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.missed_rows import Backlog, MissedRows
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.engine.runner.draft_policy import Proposal, TwoDrafters
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.feedback.skip_gate import DrafterGate, first_token
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree


class SkippingMergedDrafters(TwoDrafters):
    """Merged drafters; the one with weights is skipped if n-gram lookup is confident enough.

    A skipped drafter does not read the step either, since reading costs as much as drafting. Missed
    rows are kept until it drafts again. Only a CPU can decide this in every step.

    Args:
        drafters: one of them is the lookup, without a cache.
        num_slots: request slots of the engine.
        controller: knows what asking costs.
    """

    def __init__(
        self,
        drafters: list[Drafter],
        options: CombineConfig,
        num_nodes: int,
        num_slots: int,
        device: torch.device,
        controller: Controller,
    ) -> None:
        super().__init__(drafters, options, num_nodes, device)
        (self.lookup,) = (at for at, drafter in enumerate(drafters) if not drafter.cache_layers())
        self.gate, self.behind, self.controller = DrafterGate(), Backlog(), controller
        self.scratch_idx = num_slots - 1
        # By request slot, for the tree under verification.
        self.sure = torch.zeros(num_slots)
        self.both = torch.zeros(num_slots, dtype=torch.bool)

    def begin(self, req_idx: int) -> None:
        super().begin(req_idx)
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
        self.found = self.draft(lookup, rows)
        sure = first_token(self.found)
        slots = rows.req_idx.numpy()  # a host tensor
        everyone = np.ones(len(slots), dtype=bool)
        votes = everyone
        if self.wanted is not None:
            votes = np.isin(np.arange(len(slots)), self.wanted.numpy())  # a host tensor
        self.read = sum(map(self.behind.rows, slots.tolist()))  # a host array
        expected = self.gate.expects(sure.numpy()[votes])  # a host tensor
        behind = self.read + len(rows.token)
        # Dummy batches measure what asking costs.
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
            self.behind.keep(MissedRows.of(rows), everyone)
            if self.holes is not None:
                self.holes.skip(rows.kv_slot)

    def combine(self, rows: CommittedTokens) -> Proposal:
        found, drafter = self.found, self.drafters[1 - self.lookup]
        if self.asked:
            tree = self.draft(drafter, rows)
            if self.blind is not None:
                nothing = DraftTree.empty(len(self.blind), tree.token.shape[1], tree.token.device)
                tree = tree.where(self.blind, nothing)
            return self.of_both(tree, found) if self.lookup else self.of_both(found, tree)
        none, never = torch.zeros_like(found.size), torch.zeros_like(found.size, dtype=torch.bool)
        sizes = (none, found.size) if self.lookup else (found.size, none)
        second = ~never if self.lookup else never
        if self.lookup:
            found = replace(found, origin=2 * found.origins())
        return Proposal(found, sizes, second, never)
