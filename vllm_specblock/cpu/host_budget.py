"""Adaptive verification on a CPU: costs are measured in the steps themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.gpu import model_runner

from vllm_specblock.cpu.measure_step_cost import measure_steps, padded
from vllm_specblock.engine.adaptive import budget
from vllm_specblock.engine.adaptive.budget import TreeBudgetManager
from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.worker_base import CompilationTimes


class HostBudgetManager(TreeBudgetManager):
    """TreeBudgetManager for a CPU: budgets are computed from the trees to be verified, not
    from those of the previous step.
    """

    _unknown = 0.0

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

    from vllm.v1.worker.cpu_worker import CPUWorker  # process-wide: replaces copies to a device

    patch(CPUWorker, "compile_or_warm_up_model", measuring)
    budget.install(HostBudgetManager)
