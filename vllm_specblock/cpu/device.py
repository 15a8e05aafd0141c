"""The CPU as a device of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_specblock.cpu.gumbel import gumbel_sample, sample_by_depth
from vllm_specblock.cpu.top_k_top_p import apply_top_k_top_p
from vllm_specblock.engine.device import Clock, Device, ThreadClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_specblock.engine.runner.sampler import TreeSampler


class CpuDevice(Device):
    on_host = True

    def prepare(self, config: VllmConfig) -> None:
        from vllm_specblock.cpu import lora

        compile_loops(config.model_config.dtype)
        if config.lora_config is not None:
            lora.install()

    def clock(self) -> Clock:
        return ThreadClock()

    def install_budgets(self) -> None:
        from vllm_specblock.cpu import host_budget

        host_budget.install()

    def sampler_class(self) -> type[TreeSampler]:
        from vllm_specblock.cpu.sampler import PathSampler

        return PathSampler


def compile_loops(dtype: torch.dtype) -> None:
    """Compile or load what draws a token; `dtype`: the target's (processed logits are fp32)."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.empty(1, 1, dtype=torch.int64)
    for each in {dtype, torch.float32}:
        logits, heat = torch.zeros(1, 2, dtype=each), torch.ones(1)
        gumbel_sample(
            token, torch.empty(1, 1), None, logits, one, one, one, heat, 2, False, False, False
        )
    apply_top_k_top_p(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32), torch.full((1,), 0.5))
    row = torch.zeros(1, dtype=torch.int32)  # types as in a step
    sample_by_depth(lambda rows: rows, row, torch.arange(2, dtype=torch.int32), row, row[None])
