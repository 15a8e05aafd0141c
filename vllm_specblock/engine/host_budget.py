"""Adaptive verification on a CPU, where there is no graph capture in which to measure costs."""

from __future__ import annotations

import time

import numpy as np
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import model_runner

from vllm_specblock.engine import budget
from vllm_specblock.engine.budget import TreeBudgetManager
from vllm_specblock.engine.cpu.step_costs import measure_steps
from vllm_specblock.engine.patches import patch
from vllm_specblock.triton_kernels.optional_numba import takes
from vllm_specblock.triton_kernels.verify.reallocate_drafts import reallocate_drafts_reference
from vllm_specblock.triton_kernels.verify.reallocate_drafts_numba import reallocate_drafts_numba
from vllm_specblock.verify.costs import StepCosts

_FIRST_SHARES = (1.0, 0.0, 0.5, 0.25)
"""Of what is drafted, so much is verified in turn in the first steps, where costs were not measured
before."""
_FIRST_STEPS = 12
_EXPLORE_EVERY = 64
"""Later one step in so many verifies half as much as it would, or twice as much."""

_FEW, _ROUND = 16, 4
"""Steps of more tokens than so many come in few sizes: each new one has a processor's products
prepared anew."""


class HostBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a device whose memory is the host's.

    Differs in where costs come from (steps measured at start-up, and then the time from one decode
    step to the next), in that budgets are chosen by the confidences of the very trees to be
    verified, and in that they come to few sizes of steps.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.verify_costs, self.draft_costs = StepCosts(), StepCosts()
        self.steps, self.explores = 0, True
        self._before: tuple[float, list[str], int, bool] | None = None

    def measured(self, verify: dict[int, float], draft: dict[int, float]) -> None:
        """Take what steps took: tokens → seconds of verification, rising; requests → seconds of
        drafting."""
        self.verify_costs.measured(np.array(list(verify)), np.array(list(verify.values())))
        for count, seconds in draft.items():
            self.draft_costs.observe(count, count, seconds)
        self.explores = False

    def get_num_tokens(self, num_tokens_per_req, draft_tokens) -> int:
        requests = list(num_tokens_per_req)
        decodes = all(draft_tokens.get(request) for request in requests)
        self._observe(requests if decodes else None)
        # A table of all sizes that a step may have took longer than the rest of this.
        trees = len(requests) * (self.num_speculative_steps + 1)
        count = np.arange(max(sum(num_tokens_per_req.values()), trees) + 1)
        each = count[: len(requests) + 1]
        self.cost_tables = (
            self.draft_costs.seconds(each, len(requests)),
            self.verify_costs.seconds(count, len(requests)),
        )
        rested = self.switch.resting
        tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        if decodes:
            if not rested:
                tokens = self._explored()
            self._before = time.perf_counter(), requests, tokens, self.switch.resting
        return tokens

    def _observe(self, requests: list[str] | None) -> None:
        """Learn from the last step, if this one follows it: the same requests, still decoding."""
        before, self._before = self._before, None
        if before is None or requests != before[1]:
            return
        began, _, tokens, rested = before
        count, drafting = len(requests), 0.0
        if not rested:
            drafting = self.switch.draft_seconds
            self.draft_costs.observe(count, count, drafting)
        self.verify_costs.observe(tokens, count, time.perf_counter() - began - drafting)

    def _explored(self) -> int:
        """Another budget than the best one, now and then; returns the batch's tokens."""
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
            budget = min(budget + -(rows + budget) % _ROUND, limit)
        self._batch_budget = drafts, others, budget
        return rows + budget

    def _reallocate(self, *args) -> None:
        loop = reallocate_drafts_numba if takes(args[0]) else reallocate_drafts_reference
        loop(*args)

    def record_confidences(self, confidence_probs, input_batch) -> None:
        slots, count = input_batch.idx_mapping, input_batch.num_reqs
        self._confidence_probs[slots] = confidence_probs[:count]
        # Host memory, as everything here.
        self._stale_confidences[self._stale_idx].np[:] = self._confidence_probs.numpy()


def install() -> None:
    """P4 for a CPU, where vLLM takes CUDA graphs for granted; idempotent."""

    def make(original):
        def resolve_adaptive_cudagraph_mode(mode, **kwargs):
            return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode

        return resolve_adaptive_cudagraph_mode

    patch(model_runner, "resolve_adaptive_cudagraph_mode", make)

    def measuring(original):
        def compile_or_warm_up_model(self):
            if isinstance(
                getattr(self.model_runner, "adaptive_verification", None), HostBudgetManager
            ):
                measure_steps(self.model_runner)
            return original(self)

        return compile_or_warm_up_model

    patch(CPUWorker, "compile_or_warm_up_model", measuring)
    budget.install(HostBudgetManager)
