"""Adaptive verification on a CPU, with costs measured outside graph capture."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.worker.gpu import model_runner

from vllm_specblock.engine.adaptive import budget
from vllm_specblock.engine.adaptive.budget import TreeBudgetManager
from vllm_specblock.engine.cpu.measure_step_cost import measure_steps, round_up
from vllm_specblock.engine.patches import Function, patch
from vllm_specblock.feedback.step_cost import StepCost
from vllm_specblock.feedback.throughput import Throughput
from vllm_specblock.triton_kernels.optional_numba import takes
from vllm_specblock.triton_kernels.verify.reallocate_drafts import reallocate_drafts_reference
from vllm_specblock.triton_kernels.verify.reallocate_drafts_numba import reallocate_drafts_numba

if TYPE_CHECKING:
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.worker_base import CompilationTimes

_FIRST_SHARES = (1.0, 0.0, 0.5, 0.25)
"""Shares of the drafts to verify in the first steps, in turn, if costs were not measured before."""
_FIRST_STEPS = 12
_EXPLORE_EVERY = 64
"""Later, one step in this many verifies half or twice the best budget."""

_PLAIN_STEPS = 2
"""Consecutive plain steps to time one: the first still verifies existing trees."""

_MANY = 8
"""Missed rows per request above which catching up dominates the draft time."""

_FEW = 16
"""Token count above which steps are rounded to few sizes: see `round_up`."""


class Before(NamedTuple):
    """The previous step.

    Attributes:
        began: seconds, from `time.perf_counter`.
        tokens: rows of the target.
        trees: it verified trees.
        drafts: it drafted new trees.
        missed: rows that drafters had yet to read.
    """

    began: float
    requests: list[str]
    tokens: int
    trees: bool
    drafts: bool
    missed: int


class HostBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a CPU.

    - Costs come from steps measured at start-up, then from the time between decode steps.
    - Steps with and without drafts are timed against each other.
    - Budgets use the confidences of the trees to be verified, not those of an earlier step.
    - Steps are rounded to few sizes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verify_costs, self.draft_costs = StepCost(), StepCost()
        self.throughput, self.sampling = Throughput(), False
        self.steps, self.explores = 0, True
        self._before: Before | None = None
        self._row_seconds = 0.0  # to catch up, per missed row
        self._missed_rows = 0  # of the batch, before this step
        self._plain_steps = 0  # left to time
        # After a step with prompts and drafts: seconds that drafting takes without prompts.
        self._usual_drafting: float | None = None

    def measured(self, verify: dict[int, float], draft: dict[int, float]) -> None:
        """Set measured costs: tokens → seconds to verify, rising; requests → seconds to draft."""
        self.verify_costs.measured(np.array(list(verify)), np.array(list(verify.values())))
        for count, seconds in draft.items():
            self.draft_costs.observe(count, count, seconds)
        self.explores = False

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        requests = list(num_tokens_per_req)
        decodes = len(self._decoding(requests)) == len(requests)
        index = self.req_states.req_id_to_index
        samples = self.drafting_state.samples[[index[request] for request in requests]]
        self.sampling = bool(samples.mean() > 0.5)  # a host array
        self._observe(requests if decodes else None)
        # Only the sizes of this step: a full table takes longer than the rest of this method.
        most = len(requests) * (self.num_speculative_steps + 1)
        count = np.arange(max(sum(num_tokens_per_req.values()), most) + 1)
        each = count[: len(requests) + 1]
        self.cost_tables = (
            self.draft_costs.seconds(each, len(requests)),
            self.verify_costs.seconds(count, len(requests)),
        )
        trees, probing = not self.drafting_state.all_paused, self.drafting_switch.all_paused
        tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        if decodes:
            if trees:
                tokens = self._explored()
            if probing and not self.drafting_switch.all_paused:
                self.throughput.forget_drafting(len(requests), self.sampling)
            if not self.drafting_state.all_paused:
                if trees and self.throughput.wants_plain(len(requests), self.sampling):
                    self._plain_steps = _PLAIN_STEPS
                self.drafting_state.all_paused = self._plain_steps > 0
                self._plain_steps -= self.drafting_state.all_paused
            self.drafting_state.accepted = 0
            now = time.perf_counter()
            drafts = not self.drafting_state.all_paused
            self._before = Before(now, requests, tokens, trees, drafts, self._missed_rows)
        elif not self.drafting_state.all_paused:
            self._usual_drafting = float(self.cost_tables[0][len(requests)])  # a host array
        return tokens

    def _observe(self, requests: list[str] | None) -> None:
        """Learn from the previous step if this one decodes the same requests."""
        before, self._before = self._before, None
        if self._usual_drafting is not None:
            reading = self.drafting_state.draft_seconds - self._usual_drafting
            self.throughput.observe_prompts(max(0.0, reading))
            self._usual_drafting = None
        if before is None or requests != before.requests:
            return
        count, drafting = len(requests), 0.0
        if before.drafts:
            drafting = self.drafting_state.draft_seconds
            if before.trees:  # else the time includes catching up
                self.draft_costs.observe(count, count, drafting)
            elif before.missed > _MANY * count:
                self._row_seconds = drafting / before.missed
        took = time.perf_counter() - before.began
        if before.trees or not before.drafts:  # else it took a quarter longer than a plain step
            self.verify_costs.observe(before.tokens, count, took - drafting)
        if before.trees and before.drafts:
            accepted = self.drafting_state.accepted
            self.throughput.observe(count, True, count + accepted, took, self.sampling)
        elif not before.trees and not before.drafts:
            self.throughput.observe(count, False, count, took, self.sampling)

    def _gain(self, requests: int) -> float | None:
        return self.throughput.gain(requests, self.sampling)

    def _catch_up(self, slots: np.ndarray) -> float:
        # A host array.
        self._missed_rows = sum(map(self.drafting_state.missed, slots.tolist()))
        return self._row_seconds * self._missed_rows

    def _explored(self) -> int:
        """Vary the budget now and then, to explore; return the tokens of the batch."""
        drafts, others, budget = self._batch_budget
        room = max(0, self._max_total_logits - len(drafts) * self.num_bonus_tokens)
        limit = min(sum(drafts.values()), room)
        self.steps += 1
        turn, rest = divmod(self.steps, _EXPLORE_EVERY)
        if self.explores and self.steps <= _FIRST_STEPS:
            budget = int(limit * _FIRST_SHARES[self.steps % len(_FIRST_SHARES)])
        elif not rest:
            budget = min(2 * budget + 4, limit) if turn % 2 else budget // 2
        rows = sum(others.values())
        if rows + budget > _FEW:
            budget = min(round_up(rows + budget) - rows, limit)
        self._batch_budget = drafts, others, budget
        return rows + budget

    def _reallocate(self, *args: Any) -> None:
        loop = reallocate_drafts_numba if takes(args[0]) else reallocate_drafts_reference
        loop(*args)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        slots, count = input_batch.idx_mapping, input_batch.num_reqs
        self._confidence_probs[slots] = confidence_probs[:count]
        # Host memory.
        self._stale_confidences[self._stale_idx].np[:] = self._confidence_probs.numpy()


def install() -> None:
    """Allow adaptive verification without CUDA graphs. Idempotent."""

    def make(original: Function) -> Function:
        def resolve_adaptive_cudagraph_mode(mode: CUDAGraphMode, **kwargs: Any) -> CUDAGraphMode:
            return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode

        return resolve_adaptive_cudagraph_mode

    patch(model_runner, "resolve_adaptive_cudagraph_mode", make)

    def measuring(original: Function) -> Function:
        def compile_or_warm_up_model(self: CPUWorker) -> CompilationTimes:
            if isinstance(
                getattr(self.model_runner, "adaptive_verification", None), HostBudgetManager
            ):
                measure_steps(self.model_runner)
            return original(self)

        return compile_or_warm_up_model

    from vllm.v1.worker.cpu_worker import CPUWorker  # replaces copies to a device, process-wide

    patch(CPUWorker, "compile_or_warm_up_model", measuring)
    budget.install(HostBudgetManager)
