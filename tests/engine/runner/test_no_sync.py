"""Between two target steps nothing waits for the device: no line of ours reads a value of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.engines import KINDS, Engine, make_engine, shared_engine
from support.host_reads import NoHostReads
from support.matrix import PROMPTS, params

WATCHED = KINDS | {
    "adaptive": {"enable_adaptive_verification": True},
    "recorded": {"adapt": {"policy": "watch"}},
}


@contextlib.contextmanager
def watched(engine: Engine, monkeypatch):
    """Every call into ours during a step, watched; yields how often each was called."""
    calls = {"propose": 0, "_verify": 0, "prepare_attn": 0, "add_request": 0}

    def watch(owner, name: str) -> None:
        original = getattr(owner, name)

        def watching(*args, **kwargs):
            calls[name] += 1
            with NoHostReads():
                return original(*args, **kwargs)

        patch.setattr(owner, name, watching)

    with monkeypatch.context() as patch:
        # As on a device with memory of its own.
        patch.setattr(engine.speculator, "pad_rows", True)
        watch(engine.speculator, "propose")
        watch(engine.runner.rejection_sampler, "_verify")
        watch(engine.runner.model_state, "prepare_attn")
        watch(engine.runner.model_state, "add_request")
        yield calls


def generate(engine: Engine) -> None:
    requests = params(5, max_tokens=8)
    requests[1].temperature, requests[2].logprobs = 1.0, 2
    requests[3].presence_penalty = 0.3  # verifies a chain
    engine.generate(PROMPTS[:5], requests)


@pytest.fixture(scope="module", params=WATCHED)
def engine(request) -> Engine:
    make = make_engine if request.param == "adaptive" else shared_engine  # it is changed below
    engine = make({"num_speculative_tokens": 10, **WATCHED[request.param]})
    manager = engine.runner.adaptive_verification
    if manager is not None:  # heads at rest draft nothing that could be watched
        manager.controller.drafts = lambda *_: True
    return engine


def test_a_step_reads_no_device_value(engine, monkeypatch):
    with watched(engine, monkeypatch) as calls:
        generate(engine)
    assert min(calls.values()) >= 3, calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA alone knows when it waits")
def test_no_step_waits_for_the_gpu(engine, monkeypatch):
    """CUDA itself raises at every call that would wait."""
    calls = 0

    def watch(owner, name: str) -> None:
        original = getattr(owner, name)

        def watching(*args, **kwargs):
            nonlocal calls
            calls += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(owner, name, watching)

    watch(engine.speculator, "propose")
    watch(engine.runner.rejection_sampler, "_verify")
    watch(engine.runner.model_state, "prepare_attn")
    generate(engine)
    assert calls > 10
