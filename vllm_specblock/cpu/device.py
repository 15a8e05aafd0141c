"""The CPU as a device of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specblock.engine.adaptive.clocks import Clock
from vllm_specblock.engine.device import Device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_specblock.engine.runner.sampler import TreeSampler


class CpuDevice(Device):
    on_host = True

    def prepare(self, config: VllmConfig) -> None:
        from vllm_specblock.cpu import lora, warm_up

        warm_up.compile_loops(config.model_config.dtype)
        if config.lora_config is not None:
            lora.install()

    def clock(self) -> Clock:
        return Clock()

    def install_budgets(self) -> None:
        from vllm_specblock.cpu import host_budget

        host_budget.install()

    def sampler_class(self) -> type[TreeSampler]:
        from vllm_specblock.cpu.sampler import PathSampler

        return PathSampler
