"""Clocks that steps are timed by: a CPU's thread time, a GPU's events."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Seconds that this thread computed: other work on the machine hardly moves them."""

    def mark(self) -> Any:
        """Note this moment."""
        return time.thread_time()

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed the mark."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""
        return float(end - start)


class DeviceClock(Clock):
    """GPU clock: marks are CUDA events, which the host never waits for."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3)
