"""Merging two heads of which one costs nothing: the other drafts only where that is not sure."""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.combine.combined import Combined
from vllm_specblock.combine.skip import DrafterGate, first_token
from vllm_specblock.config import CombineConfig
from vllm_specblock.draft.backlog import Backlog
from vllm_specblock.draft.head import CommittedRows, Head
from vllm_specblock.engine.proposal import Merge, Proposal
from vllm_specblock.verify.verified import Verified

_COST = 0.2
"""What drafting with weights adds to a step on a CPU: 5.3 of 24.6 ms for SmolLM2-135M's drafter.
Steps measured at start-up would say 0.3: they are a third shorter than those of requests, and a
drafter that is priced so is left out too often (τ 2.65 in place of 2.85)."""

_MOST_ROWS = 64
"""Rows of a request that a drafter may be behind: what takes it in one go no longer than a step."""


class SkippingMerge(Merge):
    """Differs from Merge in that a drafter rests in steps for which a lookup alone will do.

    Following the target costs a drafter what drafting costs it, so it does not follow either: what
    it misses is kept, and taken in when it drafts again. A device whose memory is the host's can
    decide that from step to step.

    Args:
        heads: one of them keeps no cache: it has nothing to follow with.
        num_slots: request slots of the engine.
    """

    def __init__(
        self,
        heads: list[Head],
        options: CombineConfig,
        num_nodes: int,
        num_slots: int,
        device: torch.device,
    ):
        super().__init__(heads, options, num_nodes, device)
        (self.lookup,) = (at for at, head in enumerate(heads) if not head.cache_layers())
        self.gate, self.behind = DrafterGate(_COST), Backlog()
        self.asked = True
        # By request slot, of the tree under verification.
        self.sure = torch.zeros(num_slots)
        self.both = torch.zeros(num_slots, dtype=torch.bool)

    def begin(self, slot: int) -> None:
        super().begin(slot)
        self.behind.forget(slot)

    def forget(self) -> None:
        super().forget()
        self.gate = DrafterGate(_COST)

    def learn(self, verified: Verified) -> None:
        super().learn(verified)
        first = (verified.path[:, 1:2].long() - 1).clamp(min=0)
        author = verified.authors.gather(1, first)[:, 0] >> self.lookup
        live, slot = verified.live, verified.slot
        right = (verified.accepted > 0) & (author & 1 > 0)
        found = (self.sure[slot], self.both[slot], right, verified.accepted)
        self.gate.learn(*(x[live].numpy() for x in found))  # host tensors

    def advance(self, rows: CommittedRows) -> None:
        lookup, drafter = self.heads[self.lookup], self.heads[1 - self.lookup]
        lookup.advance(rows)
        self.found = lookup.draft()
        sure = first_token(self.found)
        self.asked = not self._can_wait(rows) or self.gate.asks(sure.numpy())  # a host tensor
        self.sure[rows.text_row], self.both[rows.text_row] = sure, self.asked
        if self.asked:
            drafter.advance(self.behind.catch_up(rows))
        else:
            self.behind.keep(rows, np.ones(len(rows.last), dtype=bool))

    def combine(self, rows: CommittedRows) -> Proposal:
        found, drafter = self.found, self.heads[1 - self.lookup]
        if self.asked:
            tree = drafter.draft()
            return self.union(tree, found) if self.lookup else self.union(found, tree)
        nothing, never = (
            torch.zeros_like(found.size),
            torch.zeros_like(found.size, dtype=torch.bool),
        )
        sizes = (nothing, found.size) if self.lookup else (found.size, nothing)
        second = ~never if self.lookup else never
        return Proposal(Combined.of(found, head=self.lookup + 1), sizes, second, never)

    def _can_wait(self, rows: CommittedRows) -> bool:
        """Whether what the drafter would miss can be kept and is little: no prompt, above all."""
        counts = np.diff(rows.row_start_host)
        late = [self.behind.rows(slot) for slot in rows.text_row.tolist()]  # a host tensor
        return bool((counts + late).max() <= _MOST_ROWS) and self.behind.has_room(rows)
