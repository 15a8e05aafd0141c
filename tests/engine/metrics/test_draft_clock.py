"""Time of any drafter: what is counted, and what is not."""

from __future__ import annotations

import time
from types import SimpleNamespace

from vllm_specblock.engine.metrics.draft_clock import Stopwatch


def test_time_inside_any_propose():
    speculator = SimpleNamespace(propose=lambda batch, after: time.sleep(0.01) or after)
    watch = Stopwatch(speculator, "cpu")
    for has_prefill in (False, True, False):
        assert speculator.propose(SimpleNamespace(has_prefill=has_prefill), "drafts") == "drafts"
    nanoseconds, steps = watch.take()
    assert steps == 2 and 20e6 <= nanoseconds < 200e6
    assert watch.take() == (0, 0)
