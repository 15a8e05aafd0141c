"""Calls that a drafter would not survive are refused for engines of ours, and only for these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines import DRAFTER, TARGET
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.engine import refused_calls
from vllm_specblock.engine.patches import PATCHES

NAMES = ("sleep", "start_draft_weight_update", "supports_draft_weight_updates")
LABEL = "vllm.v1.worker.gpu_worker.Worker."


@pytest.fixture
def reached(monkeypatch):
    """Calls that reached vLLM's own worker."""
    found = []
    kept = {name: PATCHES.pop(LABEL + name, None) for name in NAMES}
    for name in NAMES:
        monkeypatch.setattr(
            Worker, name, lambda self, *args, name=name: found.append((name, *args)) or True
        )
    refused_calls.install()
    yield found
    for name in NAMES:
        PATCHES.pop(LABEL + name)
        if kept[name] is not None:
            PATCHES[LABEL + name] = kept[name]


def worker(**changes) -> SimpleNamespace:
    args = EngineArgs(model=str(TARGET), max_model_len=512, enforce_eager=True, **changes)
    return SimpleNamespace(vllm_config=args.create_engine_config())


def trees(**more) -> SimpleNamespace:
    return worker(speculative_config={"method": "specblock", "model": str(DRAFTER), **more})


def test_sleep_of_level_two_is_refused_for_trees_alone(reached):
    ours = trees()
    with pytest.raises(ValueError, match=r"sleep\(level=2\).*take level 1, or a new engine\.$"):
        Worker.sleep(ours, 2)
    Worker.sleep(ours)
    Worker.sleep(worker(), level=2)
    assert reached == [("sleep", 1), ("sleep", 2)]


def test_draft_weight_updates_are_refused_for_trees_alone(reached):
    ours = trees(adapt={"policy": "watch"})
    with pytest.raises(ValueError, match=r"start_draft_weight_update.*'adapt'.*adapt use\.$"):
        Worker.start_draft_weight_update(ours)
    assert Worker.supports_draft_weight_updates(ours) is False
    assert reached == []
    Worker.start_draft_weight_update(worker())
    assert Worker.supports_draft_weight_updates(worker()) is True
    assert reached == [(name,) for name in NAMES[1:]]


def test_once_is_enough(reached):
    patched = Worker.sleep
    refused_calls.install()
    assert Worker.sleep is patched
