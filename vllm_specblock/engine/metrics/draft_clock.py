"""Draft time, T_D [SpecBlock, §3]: apart from commit, learning and counters."""

from __future__ import annotations

import time

import torch

from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.triton_kernels.feedback.device_clock import begin_span_triton, end_span_triton

DRAFTING_NS, DRAFTING_STEPS = "drafting_nanoseconds", "drafting_steps"


class DraftClock:
    """Sums the time between `begin` and `end`, over all steps that ended one.

    On a GPU, kernels read the device clock, also in graphs. The host sees the sums as late as in
    `DrafterCounters`.
    """

    def __init__(self, device: torch.device) -> None:
        # Nanoseconds, steps, and when the span that is open began.
        self.total = torch.zeros(3, dtype=torch.int64, device=device)
        self._host = self.total
        if self.total.is_cuda:
            self._host = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self._began = 0

    def begin(self) -> None:
        if self.total.is_cuda:
            return begin_span_triton(self.total)
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        if self.total.is_cuda:
            return end_span_triton(self.total)
        self.total[0] += time.perf_counter_ns() - self._began
        self.total[1] += 1

    def counts(self) -> Counts:
        """Return the counts on the host, and start copying the current ones."""
        nanoseconds, steps, _ = self._host.tolist()  # a host tensor
        if self._host is not self.total:
            self._host.copy_(self.total, non_blocking=True)
        return {(DRAFTING_NS, 0): nanoseconds, (DRAFTING_STEPS, 0): steps}
