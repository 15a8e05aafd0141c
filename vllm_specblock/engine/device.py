"""Device-dependent parts of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_specblock.engine.adaptive.clocks import Clock
    from vllm_specblock.engine.runner.sampler import TreeSampler


class Device:
    """A GPU; other devices register in `DEVICES`."""

    # Tensors are in host memory: the rows of a step are not padded, drafters can read missed rows
    # later, and costs are measured from step to step.
    on_host = False

    def prepare(self, config: VllmConfig) -> None:
        """Prepare for an engine of ours, before its drafters are loaded."""

    def clock(self) -> Clock:
        """Return the clock of its steps."""
        from vllm_specblock.engine.adaptive.clocks import DeviceClock

        return DeviceClock()

    def install_budgets(self) -> None:
        """Let vLLM build our budget manager for this device."""
        from vllm_specblock.engine.adaptive import budget

        budget.install()

    def sampler_class(self) -> type[TreeSampler]:
        from vllm_specblock.engine.runner.sampler import TreeSampler

        return TreeSampler


DEVICES: dict[str, Device] = {"cuda": Device()}
"""Type of a torch device → its `Device`."""


def device_of(device: torch.device) -> Device:
    return DEVICES.get(device.type, DEVICES["cuda"])
