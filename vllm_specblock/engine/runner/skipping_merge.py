"""Merged drafters; the costly one is skipped where the lookup is confident."""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.combine.combined import Combined
from vllm_specblock.config import CombineConfig
from vllm_specblock.drafters.common.backlog import Backlog, MissedRows
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.engine.runner.draft_policy import MergedDrafters, Proposal
from vllm_specblock.feedback.skip_gate import DrafterGate, first_token
from vllm_specblock.feedback.verified_trees import VerifiedTrees

_COST = 0.2
"""Share of a CPU step that drafting with weights takes: 5.3 of 24.6 ms for SmolLM2-135M's drafter.
Steps measured at start-up are a third shorter; their 0.3 skips the drafter too often (τ 2.65, not
2.85)."""

_MOST_ROWS = 64
"""Rows of a request that a drafter may lag: it reads them in one go in the time of a step."""


class SkippingMergedDrafters(MergedDrafters):
    """Merged drafters, of which one is skipped in steps where the lookup suffices.

    A skipped drafter does not read the step either, since reading costs as much as drafting. Missed
    rows are kept until it drafts again. Only a CPU can decide this in every step.

    Args:
        drafters: one of them is the lookup, without a cache.
        num_slots: request slots of the engine.
    """

    def __init__(
        self,
        drafters: list[Drafter],
        options: CombineConfig,
        num_nodes: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        super().__init__(drafters, options, num_nodes, device)
        (self.lookup,) = (at for at, drafter in enumerate(drafters) if not drafter.cache_layers())
        self.gate, self.behind = DrafterGate(_COST), Backlog()
        self.asked = True
        # By request slot, for the tree under verification.
        self.sure = torch.zeros(num_slots)
        self.both = torch.zeros(num_slots, dtype=torch.bool)

    def begin(self, req_idx: int) -> None:
        super().begin(req_idx)
        self.behind.forget(req_idx)

    def forget(self) -> None:
        super().forget()
        self.gate = DrafterGate(_COST)

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
        self.asked = not self._can_wait(rows) or self.gate.asks(sure.numpy())  # a host tensor
        self.sure[rows.req_idx], self.both[rows.req_idx] = sure, self.asked
        if self.asked:
            drafter.advance(self.behind.catch_up(rows))
        else:
            self.behind.keep(MissedRows.of(rows), np.ones(len(rows.last), dtype=bool))

    def combine(self, rows: CommittedTokens) -> Proposal:
        found, drafter = self.found, self.drafters[1 - self.lookup]
        if self.asked:
            tree = self.draft(drafter, rows)
            return self.union(tree, found) if self.lookup else self.union(found, tree)
        nothing, never = (
            torch.zeros_like(found.size),
            torch.zeros_like(found.size, dtype=torch.bool),
        )
        sizes = (nothing, found.size) if self.lookup else (found.size, nothing)
        second = ~never if self.lookup else never
        return Proposal(Combined.of(found, drafter=self.lookup + 1), sizes, second, never)

    def _can_wait(self, rows: CommittedTokens) -> bool:
        """Whether the missed rows are few and fit in memory; prompts are too long."""
        counts = np.diff(rows.row_start_host)
        late = [self.behind.rows(req_idx) for req_idx in rows.req_idx.tolist()]  # a host tensor
        return bool((counts + late).max() <= _MOST_ROWS) and self.behind.has_room(
            len(rows.token), rows.states
        )
