"""Engines whose drafter learns, from a trainer beside, from a folder or elsewhere."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support.dashboard import unanswered
from support.engines import DRAFTER, ROOT, TARGET, Engine, make_engine
from support.matrix import PROMPTS, Checker, params

from vllm_specblock.adapt.link.folder_link import FolderSource
from vllm_specblock.adapt.serving import recorder as recording
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.refresh import HEADS
from vllm_specblock.engine.metrics import exporter

TABLES = ROOT / "examples/two_heads/tables"
NODES = {"num_speculative_tokens": 10}
check = Checker()


@pytest.fixture
def out(tmp_path):
    """A folder in which a person chose another drafter's weights."""
    versions = VersionFolder(tmp_path / "out", DRAFTER, TARGET)
    versions.lock()
    versions.use(versions.write(checkpoint.load(TABLES), {"parent": None}))
    versions.unlock()
    return versions.out


def served(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights of the drafter that serves."""
    drafter = engine.speculator.draft_policy.drafters[0].model
    return {name: value.detach().clone().cpu() for name, value in drafter.named_parameters()}


def assert_serves(engine: Engine, folder) -> None:
    made_ready = process_after_loading(checkpoint.load(folder, torch.float32), None)
    wanted, found = dict(made_ready.named_parameters()), served(engine)
    assert found.keys() == wanted.keys() and found
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def end(engine: Engine) -> None:
    """Leave the folder to others, as the end of an engine's process does."""
    swaps = engine.speculator.recorder.swaps
    if swaps.trainer is None:
        swaps.link.close()
    else:
        swaps.trainer.stop()


def counts(engine: Engine) -> dict[str, int]:
    return {name: count for (name, _), count in engine.speculator.recorder.counts().items()}


def test_a_start_and_a_sleep_serve_what_is_current(out, reference):
    """From the first step on, whether a trainer comes up or not."""
    adapt = {"out": str(out)}
    requests, texts = params(2, max_tokens=20), PROMPTS[:2]
    expected = reference("two to start with", requests, texts)
    engine = make_engine({**NODES, "adapt": adapt})
    assert_serves(engine, TABLES)
    assert counts(engine)["adapt_swaps"] >= 1
    check(engine, requests, expected, texts)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert_serves(engine, TABLES)
    check(engine, requests, expected, texts)
    assert_serves(engine, TABLES)
    end(engine)


def test_a_trainer_elsewhere(tmp_path, reference):
    """Requests go out by a folder, and a version comes back by it; who opted out is in none."""
    folder = tmp_path / "requests"
    engine = make_engine({**NODES, "adapt": {"trainer": str(folder)}})
    requests, texts = params(4, max_tokens=40), PROMPTS[:4]
    requests[3].extra_args = {recording.SAYS: 0}
    expected = reference("four, of which one opts out", requests, texts)
    before = served(engine)
    for _ in range(3):
        check(engine, requests, expected, texts)
    # A finished request is handed on with the next step.
    link = engine.speculator.recorder.swaps.link
    while len([*folder.glob("request-*")]) < counts(engine)["adapt_recorded_requests"]:
        link._thread.join(0.05)
    config = TrainerConfig(
        str(DRAFTER), str(TARGET), "always", every=2, out=str(folder / "versions"), seconds=0
    )
    trainer = Trainer(config, FolderSource(folder))
    taken = 0
    while trainer.step():
        taken += 1
    trainer.close()
    found = counts(engine)
    assert taken == found["adapt_recorded_requests"] >= 6
    assert found["adapt_opted_out_requests"] == 3 and trainer.source.tally["updates_heads"] >= 2
    link._look()
    check(engine, requests, expected, texts)
    assert counts(engine)["adapt_swaps"] >= 1
    assert any(not torch.equal(value, before[name]) for name, value in served(engine).items())
    versions = VersionFolder(folder / "versions", DRAFTER, TARGET)
    assert_serves(engine, versions.out / versions.current())
    end(engine)


@pytest.fixture
def learning():
    adapt = {"policy": "always", "every": 2, "lr": 1e-3, "actions": "all"}
    engine = make_engine({**NODES, "adapt": adapt})
    yield engine
    end(engine)


def test_it_takes_what_its_trainer_offers(learning, reference):
    """Versions are swapped in between steps, also after a trainer was killed."""
    requests, texts = params(4, max_tokens=60), PROMPTS[:4]
    expected = reference("four to learn from", requests, texts)
    trainer, before = learning.speculator.recorder.swaps.trainer, served(learning)

    def serve_until(what) -> None:
        until = time.monotonic() + 240  # the trainer is started beside all else that a machine does
        while not what():
            assert time.monotonic() < until, counts(learning)
            check(learning, requests, expected, texts)
            # At the lowest priority a trainer gets nothing from cores that are never idle.
            time.sleep(2)

    serve_until(lambda: counts(learning)["adapt_swaps"] >= 2)
    after = served(learning)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(not name.startswith(HEADS) for name in changed)
    assert set(counts(learning)) == exporter.LEARNING.keys()
    # The dashboard's, as far as one drafter has them.
    of_two = "agreed both_drafted second_skipped shared_nodes shared_accepted_nodes"
    assert unanswered() == {f"{exporter.PREFIX}{name}_total" for name in of_two.split()}
    os.kill(trainer.pid, signal.SIGKILL)
    serve_until(lambda: counts(learning)["adapt_trainer_restarts"] == 1)
    swaps = counts(learning)["adapt_swaps"]
    serve_until(lambda: counts(learning)["adapt_swaps"] > swaps)
    found = counts(learning)
    assert found["adapt_versions_refused_checksum"] == 0
    assert found["adapt_recorded_requests"] > 10 and found["adapt_swap_microseconds"] > 0
