"""Device-dependent parts of an engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_specblock.engine.runner.sampler import TreeSampler


class Clock:
    """Clock of steps: a GPU's events, which the host never waits for."""

    def mark(self) -> Any:
        """Note this moment."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed the mark."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""
        return float(start.elapsed_time(end) / 1e3)


class ThreadClock(Clock):
    """Seconds that this thread computed: other work on the machine hardly moves them."""

    def mark(self) -> Any:
        return time.thread_time()

    def passed(self, mark: Any) -> bool:
        return True

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class Device:
    """A GPU; other devices register in `DEVICES`."""

    # Tensors are in host memory: the rows of a step are not padded, drafters can read missed rows
    # later, and costs are measured from step to step.
    on_host = False

    def prepare(self, config: VllmConfig) -> None:
        """Prepare for an engine of ours, before its drafters are loaded."""

    def clock(self) -> Clock:
        return Clock()

    def install_budgets(self) -> None:
        """Let vLLM build our budget manager for this device."""
        from vllm_specblock.engine import adaptive

        adaptive.install()

    def sampler_class(self) -> type[TreeSampler]:
        from vllm_specblock.engine.runner.sampler import TreeSampler

        return TreeSampler


DEVICES: dict[str, Device] = {"cuda": Device()}
"""Type of a torch device → its `Device`."""


def device_of(device: torch.device) -> Device:
    return DEVICES.get(device.type, DEVICES["cuda"])
