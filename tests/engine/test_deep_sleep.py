"""Sleep that discards the drafter is refused, and only that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines import DRAFTER, TARGET
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.engine import deep_sleep
from vllm_specblock.engine.patches import PATCHES

LABEL = "vllm.v1.worker.gpu_worker.Worker.sleep"


@pytest.fixture
def slept(monkeypatch):
    """Levels at which vLLM's own worker was put to sleep."""
    levels = []
    monkeypatch.setattr(Worker, "sleep", lambda self, level=1: levels.append(level))
    kept = PATCHES.pop(LABEL, None)
    deep_sleep.install()
    yield levels
    PATCHES.pop(LABEL)
    if kept is not None:
        PATCHES[LABEL] = kept


def worker(**changes) -> SimpleNamespace:
    args = EngineArgs(model=str(TARGET), max_model_len=512, enforce_eager=True, **changes)
    return SimpleNamespace(vllm_config=args.create_engine_config())


def test_level_two_is_refused_for_trees_alone(slept):
    trees = worker(speculative_config={"method": "specblock", "model": str(DRAFTER)})
    with pytest.raises(ValueError, match=r"sleep\(level=2\).*take level 1, or a new engine\.$"):
        Worker.sleep(trees, 2)
    Worker.sleep(trees)
    Worker.sleep(worker(), level=2)
    assert slept == [1, 2]


def test_once_is_enough(slept):
    patched = Worker.sleep
    deep_sleep.install()
    assert Worker.sleep is patched
