"""vLLM's own update of a draft model is refused for engines of ours, and only for these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engines import DRAFTER, TARGET
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_worker import Worker

from vllm_specblock.engine import draft_updates
from vllm_specblock.engine.patches import PATCHES

NAMES = ("start_draft_weight_update", "supports_draft_weight_updates")
LABEL = "vllm.v1.worker.gpu_worker.Worker."


@pytest.fixture
def asked(monkeypatch):
    """Which of the two reached vLLM's own worker."""
    found = []
    kept = {name: PATCHES.pop(LABEL + name, None) for name in NAMES}
    for name in NAMES:
        monkeypatch.setattr(Worker, name, lambda self, name=name: found.append(name) or True)
    draft_updates.install()
    yield found
    for name in NAMES:
        PATCHES.pop(LABEL + name)
        if kept[name] is not None:
            PATCHES[LABEL + name] = kept[name]


def worker(**changes) -> SimpleNamespace:
    args = EngineArgs(model=str(TARGET), max_model_len=512, enforce_eager=True, **changes)
    return SimpleNamespace(vllm_config=args.create_engine_config())


def test_draft_weight_updates_are_refused_for_trees_alone(asked):
    given = {"method": "specblock", "model": str(DRAFTER), "adapt": {"policy": "watch"}}
    trees = worker(speculative_config=given)
    with pytest.raises(ValueError, match=r"start_draft_weight_update.*'adapt'.*adapt use\.$"):
        Worker.start_draft_weight_update(trees)
    assert Worker.supports_draft_weight_updates(trees) is False
    assert asked == []
    Worker.start_draft_weight_update(worker())
    assert Worker.supports_draft_weight_updates(worker()) is True
    assert asked == list(NAMES)


def test_once_is_enough(asked):
    patched = Worker.start_draft_weight_update
    draft_updates.install()
    assert Worker.start_draft_weight_update is patched
