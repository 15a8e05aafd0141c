"""Between two target steps nothing waits for the device: no line of ours reads a value of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from support.engines import KINDS, Engine, shared_engine
from support.host_reads import no_host_reads
from support.matrix import PROMPTS, params

ADAPTIVE = {"enable_adaptive_verification": True, "adapt": {"policy": "watch"}}
WATCHED = KINDS | {"adaptive, recorded": ADAPTIVE}

STEP = ("propose", "_verify", "prepare_attn")
"""Of the speculator, the sampler and the model state."""


@contextlib.contextmanager
def no_waits():
    """CUDA itself raises at every call that would wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_steps(engine: Engine, monkeypatch, within, names: Sequence[str]) -> None:
    """Generate, with every call of ours by these names within a context."""
    calls = Counter()

    def watch(owner, name: str) -> None:
        original = getattr(owner, name)

        def watching(*args, **kwargs):
            calls[name] += 1
            with within():
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watching)

    for owner in (engine.speculator, engine.runner.rejection_sampler, engine.runner.model_state):
        for name in [name for name in names if hasattr(owner, name)]:
            watch(owner, name)
    requests = params(5, max_tokens=8)
    requests[1].temperature, requests[2].logprobs = 1.0, 2
    requests[3].presence_penalty = 0.3  # verifies a chain
    engine.generate(PROMPTS[:5], requests)
    assert calls.keys() == set(names) and min(calls.values()) >= 3, calls


@pytest.fixture(scope="module", params=WATCHED)
def engine(request) -> Engine:
    engine = shared_engine({"num_speculative_tokens": 10, **WATCHED[request.param]})
    manager = engine.runner.adaptive_verification
    if manager is not None:  # heads at rest draft nothing that could be watched
        manager.controller.drafts = lambda *_: True
    return engine


def test_a_step_reads_no_device_value(engine, monkeypatch):
    # As on a device with memory of its own.
    monkeypatch.setattr(engine.speculator, "pad_rows", True)
    assert_steps(engine, monkeypatch, no_host_reads, [*STEP, "add_request"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA alone knows when it waits")
def test_no_step_waits_for_the_gpu(engine, monkeypatch):
    assert_steps(engine, monkeypatch, no_waits, STEP)
