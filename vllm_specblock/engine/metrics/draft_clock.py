"""Draft time, T_D [SpecBlock, §3]: of our drafters, and of vLLM's own speculators."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.triton_kernels.feedback.device_clock import begin_span_triton, end_span_triton

DRAFTING_NS, DRAFTING_STEPS = "drafting_nanoseconds", "drafting_steps"


class DraftClock:
    """Sums the time between `begin` and `end`, over all steps that ended one.

    On a GPU, kernels read the device clock, also in graphs.

    Args:
        total: [3] int64: nanoseconds, steps, and when the span that is open began.
        host: `total`, or a copy of it on the host that `DrafterCounters` refreshes.
    """

    def __init__(self, total: torch.Tensor, host: torch.Tensor) -> None:
        self.total, self._host = total, host
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
        nanoseconds, steps, _ = self._host.tolist()  # a host tensor
        return {(DRAFTING_NS, 0): nanoseconds, (DRAFTING_STEPS, 0): steps}


class Stopwatch:
    """Time inside the `propose` of a speculator of Model Runner V2, in steps without prompts.

    Ours commits there, too, and has a `DraftClock`. On a GPU the device's time, else wall clock.
    """

    def __init__(self, speculator: Any, on_gpu: bool) -> None:
        self.event = (lambda: torch.cuda.Event(enable_timing=True)) if on_gpu else None
        self.spans: list[tuple[Any, Any]] = []
        propose = speculator.propose

        def timed(batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
            start = self._now()
            result = propose(batch, *args, **kwargs)
            if not batch.has_prefill:
                self.spans.append((start, self._now()))
            return result

        speculator.propose = timed

    def _now(self) -> Any:
        if self.event is None:
            return time.perf_counter()
        event = self.event()
        event.record()
        return event

    def take(self) -> tuple[int, int]:
        """Nanoseconds since the last call, and in how many steps."""
        spans, self.spans = self.spans, []
        if self.event is None:
            return int(sum(end - start for start, end in spans) * 1e9), len(spans)
        if spans:
            spans[-1][1].synchronize()
        return int(sum(start.elapsed_time(end) for start, end in spans) * 1e6), len(spans)
