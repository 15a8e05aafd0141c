"""What vLLM serves to warm up is recorded of nobody, and what comes after it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.engine import made_up_requests
from vllm_specblock.engine.patches import PATCHES

LABEL = "vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model"


@pytest.fixture
def warm_up(monkeypatch):
    """Lets a stand-in for vLLM's own warm-up be put in; gives the worker's method."""

    def put(serve):
        monkeypatch.setattr(Worker, "compile_or_warm_up_model", serve)
        made_up_requests.install()
        return Worker.compile_or_warm_up_model

    kept = PATCHES.pop(LABEL, None)
    yield put
    PATCHES.pop(LABEL, None)
    if kept is not None:
        PATCHES[LABEL] = kept


def test_nobody_is_recorded_while_an_engine_warms_up(warm_up):
    recorder, seen = SimpleNamespace(warming_up=False), []

    def serve(self):
        seen.append(recorder.warming_up)
        return "times"

    run = warm_up(serve)
    ours = SimpleNamespace(model_runner=SimpleNamespace(speculator=SimpleNamespace()))
    assert run(ours) == "times" and seen == [False], "one that does not learn"
    ours.model_runner.speculator.recorder = recorder
    assert run(ours) == "times" and seen == [False, True] and not recorder.warming_up
    assert run(SimpleNamespace(model_runner=SimpleNamespace(speculator=None))) == "times"


def test_a_warm_up_that_fails_silences_nothing_after_it(warm_up):
    def serve(self):
        raise MemoryError

    recorder = SimpleNamespace(warming_up=False)
    speculator = SimpleNamespace(recorder=recorder)
    with pytest.raises(MemoryError):
        warm_up(serve)(SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator)))
    assert not recorder.warming_up
