"""Adaptive verification in the speculator: survival of nodes, paused requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.drafters.common.missed_rows import Backlog, MissedRows
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.engine.adaptive.budget import OURS
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.feedback.acceptance_estimator import AcceptanceEstimator
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.feedback.step_cost import BRIEF, LOOKUP, WHOLE
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.write_survival import Later


class AdaptiveTrees:
    """Estimates the survival of nodes and passes it to the budget manager.

    Attributes (S request slots):
        controller: decides in every step that only decodes.
        all_paused: drafting is paused at the end of this step.
        declined: [S] bool, requests that declined drafts; declined_there: on the device.
        samples: [S] bool, requests at T > 0.
        clock: that steps are timed by; marks: around the last proposal.
        accepted: draft tokens accepted in the last step; None on a GPU.
        brief: proposals are of the first block only; lengths: what it can be.
        by: LOOKUP, BRIEF or WHOLE, the last proposal; read: rows that its drafter had missed.
        decide: called with the batch of a step without scheduled drafts.

    Args:
        follow: a drafter has a cache and must read every committed row.
        backlog: rows that drafters have yet to read; only on a CPU.
        confidence: [requests, N] fp32, the runner's buffer, in batch order.
    """

    def __init__(
        self,
        controller: Controller,
        follow: bool,
        backlog: Backlog | None,
        states: RequestState,
        tree_states: TreeStates,
        confidence: torch.Tensor,
        device: torch.device,
    ) -> None:
        self.controller, self.all_paused = controller, False
        self.tree_states, self.confidence = tree_states, confidence
        self.backlog, self.reads_prompts = backlog, follow and backlog is None
        self.declined, self.samples = np.zeros((2, len(tree_states.accepted)), dtype=bool)
        self.declined_there = torch.from_numpy(self.declined.copy()).to(device)
        self.acceptance = AcceptanceEstimator(device)
        self.marks: tuple[Any, Any] | None = None
        self.accepted: int | None = None
        self.by, self.read = WHOLE, 0
        self.brief, self.lengths = False, [False]
        self.later: Later | None = None
        self.decide: Callable[[InputBatch], None] = lambda batch: None
        here = device_of(device)
        self.on_host, self.clock = here.on_host, here.clock()
        setattr(states, OURS, self)
        here.install_budgets()

    def add(self, req_idx: int, samples: bool, drafts: bool) -> None:
        """Add a request in slot `req_idx`; samples: T > 0; drafts: it accepts drafts."""
        self.declined[req_idx], self.samples[req_idx] = not drafts, samples
        self.declined_there[req_idx].fill_(not drafts)

    def undrafted(self, batch: InputBatch) -> frozenset[str]:
        """Return the requests of a batch without new drafts."""
        declined = self.declined[batch.idx_mapping_np] | self.all_paused
        return frozenset(request for request, alone in zip(batch.req_ids, declined) if alone)

    def missed(self, slots: np.ndarray) -> int:
        """Return how many committed rows of requests their drafters have yet to read."""
        return 0 if self.backlog is None else sum(map(self.backlog.rows, slots.tolist()))

    def is_paused(self, batch: InputBatch) -> bool:
        """Whether drafting is paused at the end of this step.

        The manager decides in decode steps. A batch of prompts ends the pause if drafters could not
        read it later.
        """
        if self.reads_prompts and batch.is_prefilling_np[: batch.num_reqs].all():  # a host array
            self.all_paused = self.controller.paused = False
        return self.all_paused

    def learn(self, verified: VerifiedTrees) -> None:
        """Learn from the verified trees."""
        self.acceptance.learn_from(verified)
        if self.on_host:
            self.accepted = int(verified.accepted.sum())  # a host tensor

    def has_blocks(self, drafters: Sequence[Drafter]) -> None:
        """Let the controller decide whether drafters draft all of their blocks."""
        first = max(drafter.first_block for drafter in drafters)
        others = sum(1 << at for at, each in enumerate(drafters) if not each.first_block)
        if first:
            self.lengths = [False, True]
            self.later = Later(self.tree_states.depth, self.tree_states.origin, first, others)

    def drafted(self, began: Any, asked: bool, read: int = 0, prompts: int = 0) -> None:
        """Note a proposal that ends now.

        Args:
            began: mark of `clock`.
            asked: a drafter with weights took part; read: rows that it had missed before.
            prompts: requests of a batch with prompts, which drafters have read; 0: it had none.
        """
        self.by = LOOKUP if not asked else BRIEF if self.brief else WHOLE
        self.marks, self.read = (began, self.clock.mark()), read
        if prompts and self.on_host:
            cost = self.controller.cost
            usual = cost.draft(prompts, self.by) / cost.of(1.0)
            self.controller.observe_prompts(self.clock.seconds(*self.marks) - usual)

    def write_survival(self, req_idx: torch.Tensor, temperature: torch.Tensor) -> None:
        """Write the survival of the new trees' nodes.

        Args:
            req_idx: [R] integers, slots with new trees.
            temperature: [R] fp32.
        """
        self.acceptance.write_survival(
            self.tree_states.score, temperature, req_idx, self.confidence, self.later
        )

    def nothing_drafted(self, num_reqs: int) -> None:
        """Reset the confidences of a batch without drafts, so that the manager ignores them."""
        self.confidence[:num_reqs] = 1

    def pause(self, batch: InputBatch, rows: Callable[[], MissedRows]) -> None:
        """Pause drafting at the end of this step.

        Args:
            rows: returns the committed rows of the step.
        """
        if self.backlog is not None:
            self.backlog.keep(rows(), ~self.declined[batch.idx_mapping_np])
        self.confidence[: batch.num_reqs] = 0
        # Drafts scheduled next are placeholders.
        self.tree_states.accepted.index_fill_(0, batch.idx_mapping, 0)
