"""Draft time, T_D [SpecBlock, §3]: of our drafters, and of vLLM's own speculators."""

from __future__ import annotations

import time
from typing import Any

import torch

from vllm_specblock.triton_kernels.feedback.device_clock import begin_span_triton, end_span_triton


class DraftClock:
    """Sums the time between `begin` and `end`, over all steps that ended one.

    On a GPU, kernels read the device clock, also in graphs; else wall clock.

    Args:
        total: [3] int64, nanoseconds, steps, and when the open span began.
    """

    SIZE = 3

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self._began = total, 0

    def begin(self) -> None:
        if self.total.is_cuda:
            return begin_span_triton(self.total)
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        if self.total.is_cuda:
            return end_span_triton(self.total)
        self.total[0] += time.perf_counter_ns() - self._began
        self.total[1] += 1


class Stopwatch(DraftClock):
    """Time inside the `propose` of a speculator of Model Runner V2, in steps without prompts.

    For vLLM's own: ours also commits there.
    """

    def __init__(self, speculator: Any, device: str) -> None:
        super().__init__(torch.zeros(self.SIZE, dtype=torch.int64, device=device))
        propose = speculator.propose

        def timed(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.begin()
            result = propose(batch, *args, **kwargs)
            if not batch.has_prefill:
                self.end()
            return result

        speculator.propose = timed

    def take(self) -> tuple[int, int]:
        """Nanoseconds since the last call, and in how many steps; waits for the device."""
        nanoseconds, steps, _ = self.total.tolist()  # a host read, not for a step
        self.total.zero_()
        return nanoseconds, steps
