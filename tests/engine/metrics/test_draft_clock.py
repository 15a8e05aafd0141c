"""Time of the drafters' forwards: what is counted, and what is not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from vllm_specblock.engine.metrics.draft_clock import DraftClock, Stopwatch


def test_only_whole_spans_count():
    clock = DraftClock(torch.zeros(3, dtype=torch.int64))
    for ends in (True, False, True):
        clock.begin()
        time.sleep(0.01)
        if ends:
            clock.end()
    nanoseconds, steps, _ = clock.total.tolist()
    assert steps == 2 and 20e6 <= nanoseconds < 200e6


def test_time_inside_any_propose():
    speculator = SimpleNamespace(propose=lambda batch, after: time.sleep(0.01) or after)
    watch = Stopwatch(speculator, "cpu")
    for has_prefill in (False, True, False):
        assert speculator.propose(SimpleNamespace(has_prefill=has_prefill), "drafts") == "drafts"
    nanoseconds, steps = watch.take()
    assert steps == 2 and 20e6 <= nanoseconds < 200e6
    assert watch.take() == (0, 0)
