"""The trainer: what it learns, what it offers, what it goes on from, and how its process ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapting import Pair, staged, wait
from support.processes import alive

from vllm_specblock.adapt.learning.judge import depth_along
from vllm_specblock.adapt.link.folder_link import FolderLink, FolderSource
from vllm_specblock.adapt.policy.actions import put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer import process as process_module
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import (
    CANNOT_START,
    LARGEST,
    Trainer,
    TrainerConfig,
    serve,
)
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError

HEADS = {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}


@pytest.fixture
def engine(pair):
    link = pair.link()
    yield link
    link.close()


@pytest.fixture
def out(tmp_path) -> Path:
    """A folder for versions that outlives engines."""
    return tmp_path / "out"


@pytest.fixture
def keeping(pair, out):
    """An engine that serves the versions in `out`."""
    link = pair.link(out)
    yield link
    link.close()


def config_of(pair: Pair, **more) -> TrainerConfig:
    return TrainerConfig(str(pair.drafter), str(pair.target), "always", "all", lr=3e-3, **more)


class Both:
    """An engine's end, and a trainer in the same process."""

    def __init__(self, pair: Pair, engine: FolderLink, **more):
        self.pair, self.engine = pair, engine
        engine.versions.lock()
        config = replace(config_of(pair), link=str(engine.folder), **more)
        self.trainer = Trainer(config, FolderSource(engine.folder))

    def serve(self, requests: range) -> list:
        """Finish requests one by one, and take what is offered. Returns what was taken."""
        taken = []
        for number in requests:
            assert self.engine.offer(*self.pair.request(number))
            wait(self.trainer.step)
            if (found := staged(self.engine)) is not None:
                self.engine.took(found)
                taken.append(found)
        return taken

    @property
    def counts(self):
        return self.trainer.source.tally


def holds(tensors, found) -> bool:
    """Whether a version's tensors are some weights."""
    return all(torch.equal(tensors[name], each) for name, each in found.tensors.items())


@pytest.mark.parametrize(
    ("policy", "actions", "requests"),
    [("always", "all", 32), ("gain", "heads", 60), ("paper", "heads", 60)],
)
def test_what_was_recorded_is_learned_and_reaches_the_engine(
    pair, engine, policy, actions, requests
):
    both = Both(pair, engine, policy=policy, actions=actions)
    taken, counts = both.serve(range(requests)), both.counts
    updates, others = counts["updates_heads"], counts["updates_full"]
    if actions == "all":
        updates, others = others, updates
        assert len(taken) == updates == counts["versions_offered"] >= 4
        assert [each.number for each in taken] == list(range(1, len(taken) + 1))
        assert counts["update_microseconds_full"] > 0
        assert engine.versions.names() == [f"version-{len(taken):05d}"], "earlier ones are removed"
    assert taken and updates > 0 == others
    assert all((set(each.tensors) == HEADS) == (actions == "heads") for each in taken)
    assert wait(lambda: engine.counts[f"updates_{LARGEST[actions]}"] == updates)
    if policy == "gain":
        assert counts["judged_requests"] == 60 and counts["judged_gain_millitokens"] > 0
    sequence = pair.teacher.sequence(pair.record(1000))
    drafter = checkpoint.load(pair.drafter)
    before = depth_along(drafter, sequence, 2)
    put(drafter, {**dict(drafter.named_parameters()), **taken[-1].tensors})
    gain = depth_along(drafter.requires_grad_(False), sequence, 2) - before
    assert gain > (0.3 if policy == "always" else 0)


def test_rows_of_another_target_are_dropped(pair, engine):
    both = Both(pair, engine)
    record, request = pair.request(0)
    engine.offer(replace(record, states=record.states[:, :-3].clone()), request)
    wait(both.trainer.step)
    assert both.counts["dropped_records"] == 1


def test_a_later_trainer_goes_on_from_what_serves_and_chooses_nothing_anew(pair, keeping, out):
    both = Both(pair, keeping, out=str(out))
    taken = both.serve(range(30))
    both.trainer.close()
    stamp = keeping.versions.stamp()
    after = Both(pair, keeping, out=str(out))
    assert holds(after.trainer.adaptation.pool.current.tensors, taken[-1])
    after.trainer.step()
    assert staged(keeping) is None and keeping.versions.stamp() == stamp  # it serves already
    more = after.serve(range(30, 60))
    assert more and all(each.number > taken[-1].number for each in more)


def test_where_what_serves_is_lost_the_start_is_offered(pair, engine):
    both = Both(pair, engine)
    both.serve(range(8))
    both.trainer.close()
    (name,) = engine.versions.names()
    (engine.versions.out / name / "model.safetensors").write_bytes(b"torn")
    Both(pair, engine)
    found = staged(engine)
    assert (found.number, found.action) == (0, Action.FULL)
    assert holds(dict(checkpoint.load(pair.drafter).named_parameters()), found)


def test_versions_are_kept_and_a_person_may_choose(pair, keeping, out):
    both = Both(pair, keeping, out=str(out))
    (first, *_), folder = both.serve(range(16)), pair.versions(out)
    name, facts = next(iter(folder.listed().items()))
    assert facts["parent"] is None and facts["action"] == "full" and facts["rows"] > 0
    assert len(folder.names()) == 2 and holds(folder.read(name), first)
    assert folder.current() == "version-00002"
    folder.use(None)
    both.trainer.step()
    assert both.trainer.adaptation.pool.current is both.trainer.adaptation.pool.origin
    assert staged(keeping).number == 0
    folder.use(name)
    both.trainer.step()
    assert holds(both.trainer.adaptation.pool.current.tensors, staged(keeping))
    assert folder.current() == name
    both.trainer.close()
    folder.use(None)
    after = Both(pair, keeping, out=str(out)).trainer.adaptation
    assert after.pool.current is after.training is after.pool.origin
    assert holds(dict(after.updater.drafter.named_parameters()), after.pool.origin)


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    """What the engine's side warns of; its logger may be kept from pytest by vLLM's settings."""
    said: list[str] = []
    monkeypatch.setattr(process_module.logger, "warning", lambda text, *_: said.append(text))
    return said


def test_a_trainer_that_is_killed_is_started_again_and_then_given_up(pair, keeping, out, warned):
    process = TrainerProcess(config_of(pair, out=str(out)), keeping, waits=(0.01,))
    process.start()
    with pytest.raises(TrainError, match="Another engine or trainer"):
        pair.versions(out).lock()
    first = wait(lambda: process.pid)
    assert wait(lambda: os.getpriority(os.PRIO_PROCESS, first) == 19)
    os.kill(first, signal.SIGKILL)
    second = wait(lambda: process.pid != first and process.pid)
    number = itertools.count()  # until it has learned something
    wait(lambda: (keeping.offer(*pair.request(next(number))), keeping.staged())[1])
    os.kill(second, signal.SIGKILL)
    wait(lambda: process.gave_up)
    assert process.pid is None and "serving continues" in warned[0]
    assert keeping.counts["trainer_restarts"] == 1
    process.stop()
    assert not keeping.folder.exists()
    folder = pair.versions(out)
    folder.read(folder.current())
    folder.lock()  # no process holds it, and what was half-written goes
    assert not [path for path in out.iterdir() if path.name.startswith(".") and path.is_dir()]


@pytest.fixture
def signals():
    """Handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_trainer_that_is_stopped_writes_what_it_learned(pair, keeping, signals):
    """What its process runs, in this one: another takes seconds to start."""
    keeping.versions.lock()
    for number in range(16):
        keeping.offer(*pair.request(number))

    def stop() -> None:
        wait(lambda: keeping.counts["versions_offered"] == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    config = config_of(pair, seconds=1e9, out=str(keeping.versions.out), link=str(keeping.folder))
    assert serve(config) == 0
    assert keeping.versions.current() == "version-00002"


ENGINE = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from support.adapting import Pair
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
pair = Pair.at(Path(sys.argv[1]))
link = pair.link()
process = TrainerProcess(TrainerConfig(str(pair.drafter), str(pair.target)), link)
process.start()
while not (link.folder / "counts.json").exists():
    time.sleep(0.02)
print(process.pid, link.folder, "vllm" in sys.modules, flush=True)
time.sleep(60)
"""


def test_the_trainer_and_their_folder_end_with_an_engine_that_is_killed(pair):
    path = [str(Path(__file__).parents[2] / "lib"), str(Path(__file__).parents[3] / "benchmarks")]
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, pair.drafter.parent, *path],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, folder, has_vllm = engine.stdout.readline().split()
    assert has_vllm == "False" and Path(folder).is_dir()
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "/vllm/" not in mapped
    engine.kill()
    engine.wait()
    wait(lambda: not alive(int(pid)), 10)
    assert not Path(folder).exists()


def test_a_trainer_that_cannot_start_is_not_tried_again(pair, engine, capfd, warned, signals):
    (pair.target / "model.safetensors").unlink()
    assert serve(config_of(pair, link=str(engine.folder))) == CANNOT_START
    said = capfd.readouterr().err
    assert "neither a .safetensors file" in said and "Traceback" not in said
    process = TrainerProcess(config_of(pair), engine)
    process._run = lambda: CANNOT_START
    process.start()
    wait(lambda: process.gave_up)
    assert engine.counts["trainer_restarts"] == 0 and "not restarted" in warned[0]
    process.stop()
