"""Adaptive verification on a CPU: costs come from the steps themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.worker.gpu import model_runner

from vllm_specblock.cpu.measure_step_cost import measure_steps, padded
from vllm_specblock.engine.adaptive import budget
from vllm_specblock.engine.adaptive.budget import TreeBudgetManager, clock
from vllm_specblock.engine.patches import Function, patch
from vllm_specblock.feedback.controller import Step

if TYPE_CHECKING:
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.worker_base import CompilationTimes


class _Begun(NamedTuple):
    """A step under way; began: seconds, by `clock`; behind: rows that drafters had missed."""

    began: float
    requests: list[str]
    rows: int
    trees: bool
    drafts: bool
    behind: int


class HostBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a CPU.

    Times are taken from one decode step to the next, and budgets from the confidences of the very
    trees to be verified, not of those a step earlier.
    """

    _begun: _Begun | None = None
    _unknown = 0.0

    def _observe(self, requests: list[str], decodes: bool, sampling: bool) -> None:
        begun, self._begun = self._begun, None
        state = self.drafting_state
        if begun is None or not decodes or begun.requests != requests:
            return
        self.controller.observe(
            Step(
                len(requests),
                begun.rows,
                begun.trees,
                begun.drafts,
                len(requests) + (state.accepted if begun.trees else 0),
                clock() - begun.began,
                state.draft_seconds,
                state.asked,
                begun.behind + state.read if state.asked else 0,
            ),
            sampling,
        )

    def _begin(self, requests: list[str], rows: int, trees: bool, behind: int) -> None:
        drafts = not self.drafting_state.all_paused
        self._begun = _Begun(clock(), requests, rows, trees, drafts, behind)

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        return padded(rows)

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
