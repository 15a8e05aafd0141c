"""Time inside the `propose` of vLLM's own speculators."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


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
