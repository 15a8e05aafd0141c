"""vLLM's warm-up requests are not observed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_specblock.engine.runner.model_state import TreeModelState


@pytest.mark.parametrize(
    ("name", "observed"), [("_warmup_3_", 0), ("_v2_mixed_warmup_decode_", 0), ("7-a3f2", 1)]
)
def test_warm_up_requests_are_not_observed(monkeypatch, name, observed):
    begun = []
    monkeypatch.setattr(DefaultModelState, "add_request", lambda *_: None)
    recorder = SimpleNamespace(begin=lambda slot, request: begun.append(slot))
    state = TreeModelState.__new__(TreeModelState)
    state.tree_states = SimpleNamespace(reset=lambda slot: None)
    state.speculator = SimpleNamespace(recorder=recorder, note_request=lambda *_: None)
    state.add_request(5, SimpleNamespace(req_id=name, sampling_params=None))
    assert begun == [5] * observed
