"""The CPU as a device of the engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from vllm_specblock.cpu.gumbel import gumbel_sample, sample_by_depth
from vllm_specblock.cpu.top_k_top_p import apply_top_k_top_p
from vllm_specblock.engine.device import Device
from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuDevice(Device):
    on_host = True
    sampler = "vllm_specblock.cpu.sampler:PathSampler"
    install_budgets = "vllm_specblock.cpu.host_budget:install"
    attention = "vllm_specblock.cpu.attention.PackedAttentionBackend"
    mla = "vllm_specblock.cpu.mla.CpuTreeMLABackend"

    def prepare(self, config: VllmConfig) -> None:
        # Compile or load what draws a token (processed logits are fp32).
        one, token = torch.zeros(1, dtype=torch.int64), torch.empty(1, 1, dtype=torch.int64)
        for each in {config.model_config.dtype, torch.float32}:
            logits, heat = torch.zeros(1, 2, dtype=each), torch.ones(1)
            given = logits, one, one, one, heat, 2, False, False, False
            gumbel_sample(token, torch.empty(1, 1), None, *given)
        share = torch.full((1,), 0.5)
        apply_top_k_top_p(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32), share)
        row = torch.zeros(1, dtype=torch.int32)  # types as in a step
        first_row = torch.arange(2, dtype=torch.int32)
        sample_by_depth(lambda rows: rows, row, first_row, row, row[None])
        if config.lora_config is not None:
            skip_tokens_without_adapter()

    def mark(self) -> float:
        return time.thread_time()  # other work on the machine hardly moves it

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


def skip_tokens_without_adapter() -> None:
    """Skip them in vLLM's CPU kernels for LoRA, which use their mark, −1, as an index.

    In a batch with adapters, such tokens would get the last one, with or without trees.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def sparing(original: Function) -> Function:
        # inputs: [T, ·]; adapter: [T] int64.
        def kernel(
            inputs: torch.Tensor,
            weights: torch.Tensor,
            output: torch.Tensor,
            adapter: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            inputs = inputs.masked_fill((adapter < 0)[:, None], 0)
            original(inputs, weights, output, adapter, *args, **kwargs)

        return kernel

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            patch(module, name, sparing)
