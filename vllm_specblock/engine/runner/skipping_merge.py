"""Merged drafters of which the costly one is skipped where a lookup is sure."""

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
"""What drafting with weights adds to a step on a CPU: 5.3 of 24.6 ms for SmolLM2-135M's drafter.
Steps measured at start-up would say 0.3: they are a third shorter than those of requests, and a
drafter that is priced so is left out too often (τ 2.65 in place of 2.85)."""

_MOST_ROWS = 64
"""Rows of a request that a drafter may be behind: what takes it in one go no longer than a step."""


class SkippingMergedDrafters(MergedDrafters):
    """Differs from Merge in that a drafter rests in steps for which a lookup alone will do.

    Following the target costs a drafter what drafting costs it, so it does not follow either: what
    it misses is kept, and taken in when it drafts again. A device whose memory is the host's can
    decide that from step to step.

    Args:
        drafters: one of them keeps no cache: it has nothing to follow with.
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
        # By request slot, of the tree under verification.
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
        self.found = self.draft(lookup, rows)
        sure = first_token(self.found)
        votes = sure if self.wanted is None else sure[self.wanted]
        self.asked = not self._can_wait(rows) or self.gate.asks(votes.numpy())  # a host tensor
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
        """Whether what the drafter would miss can be kept and is little: no prompt, above all."""
        counts = np.diff(rows.row_start_host)
        late = [self.behind.rows(req_idx) for req_idx in rows.req_idx.tolist()]  # a host tensor
        return bool((counts + late).max() <= _MOST_ROWS) and self.behind.has_room(
            len(rows.token), rows.states
        )
