"""Sleep of level 2 is refused for engines of ours, and only for these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines import DRAFTER, TARGET
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.engine import draft_weights
from vllm_specblock.engine.patches import PATCHES

NAMES = ("sleep",)
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
    draft_weights.install()
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
