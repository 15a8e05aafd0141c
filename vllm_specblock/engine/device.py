"""Device-dependent parts of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Device:
    """A GPU, which times steps by events; other devices register in `DEVICES`."""

    # Tensors are in host memory: the rows of a step are not padded, drafters can read missed rows
    # later, and costs are measured from step to step.
    on_host = False
    # "module:name", imported where a model runs.
    sampler = "vllm_specblock.engine.runner.sampler:TreeSampler"
    install_budgets = "vllm_specblock.engine.adaptive:install"  # vLLM then builds our manager
    attention = "vllm_specblock.engine.attention.TreeAttentionBackend"
    mla = "vllm_specblock.engine.mla.TreeMLABackend"

    def prepare(self, config: VllmConfig) -> None:
        """Prepare for an engine of ours, before its drafters are loaded."""

    def mark(self) -> Any:
        """Note this moment; the host never waits for a mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed the mark."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""
        return float(start.elapsed_time(end) / 1e3)


DEVICES: dict[str, Device] = {"cuda": Device()}
"""Type of a torch device → its `Device`."""


def device_of(device: torch.device) -> Device:
    return DEVICES.get(device.type, DEVICES["cuda"])
