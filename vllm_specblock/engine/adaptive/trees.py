"""Adaptive verification in the speculator: survival of nodes, paused requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.drafters.common.backlog import Backlog, MissedRows
from vllm_specblock.engine.adaptive import budget
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.feedback.acceptance_estimator import AcceptanceEstimator
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.feedback.verified_trees import VerifiedTrees


class AdaptiveTrees:
    """Estimates the survival of nodes and passes it to vLLM's manager.

    Attributes (S request slots):
        drafting_state: shared with the manager, which decides; host only.
        paused: [S] bool, `drafting_state.paused` on the device.

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
        self.tree_states, self.confidence = tree_states, confidence
        self.backlog, self.reads_prompts = backlog, follow and backlog is None
        num_slots, here = len(tree_states.accepted), device_of(device)
        self.clock = here.clock()
        self.drafting_state = budget.drafting_state_of(states, num_slots, controller, self.clock)
        if self.backlog is not None:
            self.drafting_state.missed = self.backlog.rows
        self.acceptance = AcceptanceEstimator(device)
        self.paused = torch.zeros(num_slots, dtype=torch.bool, device=device)
        here.install_budgets()

    def add(self, req_idx: int, samples: bool, drafts: bool) -> None:
        """Add a request in slot `req_idx`; samples: T > 0; drafts: it accepts drafts."""
        self.drafting_state.paused[req_idx] = not drafts
        self.drafting_state.samples[req_idx] = samples
        self.paused[req_idx].fill_(not drafts)

    def is_paused(self, batch: InputBatch) -> bool:
        """Whether drafting is paused at the end of this step.

        The manager decides in decode steps. A batch of prompts ends the pause if drafters could not
        read it later.
        """
        if self.reads_prompts and batch.is_prefilling_np[: batch.num_reqs].all():  # a host array
            self.drafting_state.all_paused = False
            self.drafting_state.controller.paused = False
        return self.drafting_state.all_paused

    def learn(self, verified: VerifiedTrees) -> None:
        """Learn from the verified trees."""
        self.acceptance.learn_from(verified)
        if self.paused.device.type == "cpu":
            self.drafting_state.accepted = int(verified.accepted.sum())  # a host tensor

    def drafted(self, began: Any, asked: bool, read: int = 0, prompts: int = 0) -> None:
        """Note a proposal that ends now.

        Args:
            began: mark of `clock`.
            asked: a drafter with weights took part; read: rows that it had missed before.
            prompts: requests of a batch with prompts, which drafters have read; 0: it had none.
        """
        state = self.drafting_state
        state.drafted, state.asked, state.read = (began, self.clock.mark()), asked, read
        if prompts and self.paused.device.type == "cpu":
            cost = state.controller.cost
            usual = cost.draft(prompts, asked) / cost.of(1.0)
            state.controller.observe_prompts(self.clock.seconds(*state.drafted) - usual)

    def write_survival(self, req_idx: torch.Tensor, temperature: torch.Tensor) -> None:
        """Write the survival of the new trees' nodes.

        Args:
            req_idx: [R] integers, slots with new trees.
            temperature: [R] fp32.
        """
        self.acceptance.write_survival(
            self.tree_states.score, temperature, req_idx, self.confidence
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
            self.backlog.keep(rows(), ~self.drafting_state.paused[batch.idx_mapping_np])
        self.confidence[: batch.num_reqs] = 0
        # Drafts scheduled next are placeholders.
        self.tree_states.accepted.index_fill_(0, batch.idx_mapping, 0)
