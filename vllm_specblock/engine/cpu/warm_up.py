"""Compiling what requests may need, or reading it from disk; and nothing else to warm up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.cpu.gumbel import gumbel_sample, sample_by_depth
from vllm_specblock.engine.cpu.top_k_top_p import apply_top_k_top_p
from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def without_made_up_requests() -> None:
    """P7: engines of ours are not warmed up by requests; idempotent.

    From 0.33 on a CPU's worker serves some before all others, so that Triton compiles its kernels.
    Here it interprets them: that would take seconds, and drafters would learn from those texts.
    """
    from vllm.v1.worker.gpu import warmup

    def make(original: Function) -> Function:
        def warmup_kernels(model_runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
            if not is_ours(model_runner.vllm_config.speculative_config):
                original(model_runner, *args, **kwargs)

        return warmup_kernels

    patch(warmup, "warmup_kernels", make)


def compile_loops(dtype: torch.dtype) -> None:
    """Draw a token with and without top-p; `dtype` is the target's, processed logits are fp32."""
    one, position = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    token, score = torch.empty(1, 1, dtype=torch.int64), torch.empty(1, 1)
    for each in {dtype, torch.float32}:
        logits = torch.zeros(1, 2, dtype=each)
        gumbel_sample(
            token,
            0,
            score,
            0,
            None,
            0,
            0,
            0,
            0,
            0,
            logits,
            0,
            one,
            one,
            position,
            torch.ones(1),
            2,
            2,
            False,
            False,
            False,
            False,
        )
    apply_top_k_top_p(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32), torch.full((1,), 0.5))
    row = torch.zeros(1, dtype=torch.int32)  # types as in a step
    sample_by_depth(lambda rows: rows, row, torch.arange(2, dtype=torch.int32), row, row[None])
