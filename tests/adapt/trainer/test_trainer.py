"""The trainer: what it learns, what it offers, what it goes on from, and how its process ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapting import Pair, staged

from vllm_specblock.adapt.learning.anchor import _live, _log_probs
from vllm_specblock.adapt.learning.judge import depth_along
from vllm_specblock.adapt.link.memory_link import EngineLink, TrainerLink
from vllm_specblock.adapt.policy.actions import put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer import state
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError

HEADS = {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


class Both:
    """An engine's end, and a trainer in the same process."""

    def __init__(self, pair: Pair, engine: EngineLink | None = None, **more):
        self.pair, self.engine = pair, engine or EngineLink(pair.sizes)
        given = {"policy": "always", "actions": "all", "lr": 3e-3, **more}
        config = TrainerConfig(str(pair.drafter), str(pair.target), **given)
        self.trainer = Trainer(config, TrainerLink(self.engine.descriptor, pair.sizes.shapes))

    def serve(self, requests: range) -> list:
        """Finish requests one by one, and take what is offered. Returns what was taken."""
        taken = []
        for number in requests:
            assert self.engine.offer(*self.pair.request(number))
            while self.trainer.step():
                pass
            if (found := staged(self.engine)) is not None:
                self.engine.took(found)
                taken.append(found)
        return taken

    @property
    def counts(self):
        return self.engine.counts


def served(pair: Pair, found) -> torch.nn.Module:
    """The drafter with a version's weights over its own."""
    drafter = checkpoint.load(pair.drafter)
    put(drafter, {**dict(drafter.named_parameters()), **found.tensors})
    return drafter.requires_grad_(False)


@torch.no_grad()
def loss_of(pair: Pair, drafter, numbers: range) -> float:
    """Nats that a drafter is away from the recorded tokens, one token ahead."""
    train_batch = pair.teacher.train_batch([pair.record(number) for number in numbers], 0, 0)
    live = _live(train_batch)
    live[:, -1] = False  # the token after the last is not recorded
    after = train_batch.batch.tokens.roll(-2, 1)[:, :-1][live]
    return float(-_log_probs(drafter, train_batch, live)[:, 0].gather(1, after[:, None]).mean())


def test_what_was_recorded_is_learned_and_reaches_the_engine(pair):
    both = Both(pair)
    taken = both.serve(range(48))
    assert len(taken) >= 4 and both.counts["updates_full"] == len(taken)
    assert [each.number for each in taken] == list(range(1, len(taken) + 1))
    before, after = checkpoint.load(pair.drafter), served(pair, taken[-1])
    assert loss_of(pair, after, range(8)) < loss_of(pair, before, range(8)) - 0.5
    sequence = pair.teacher.sequence(pair.record(1000))
    assert depth_along(after, sequence, 2) > depth_along(before, sequence, 2) + 0.3
    assert both.counts["update_microseconds_full"] > 0


@pytest.mark.parametrize("policy", ["gain", "paper", "fixed"])
def test_the_judge_or_the_bandit_lets_versions_serve(pair, policy):
    both = Both(pair, policy=policy, actions="heads")
    taken = both.serve(range(60))
    assert taken and all(set(each.tensors) == HEADS for each in taken)
    assert both.counts["updates_heads"] > 0 == both.counts["updates_full"]
    sequence = pair.teacher.sequence(pair.record(1000))
    before = depth_along(checkpoint.load(pair.drafter), sequence, 2)
    assert depth_along(served(pair, taken[-1]), sequence, 2) > before
    if policy != "paper":
        assert both.counts["judged_requests"] == 60
        assert both.counts["judged_gain_millitokens"] > 0


def test_watch_records_and_judges_and_never_trains(pair):
    both = Both(pair, policy="watch")
    before = {n: p.clone() for n, p in both.trainer.adaptation.updater.drafter.named_parameters()}
    assert both.serve(range(40)) == []
    after = dict(both.trainer.adaptation.updater.drafter.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert both.counts["judged_requests"] == 40
    assert both.counts["judged_gain_millitokens"] == 0  # what serves is the start itself
    assert both.counts["updates_heads"] == both.counts["updates_full"] == 0
    assert both.counts["versions_offered"] == 0


def test_watch_counts_what_a_version_would_gain_and_swaps_nothing(pair, tmp_path):
    """Of a folder into which another engine writes meanwhile."""
    out = tmp_path / "out"
    learned = Both(pair, out=str(out), seconds=0)
    learned.serve(range(48))
    learned.trainer.writer.write(learned.trainer._to_write(), now=True)  # which keeps its lock
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    both = Both(pair, policy="watch", out=str(out), seconds=0)
    assert both.serve(range(100, 140)) == []
    both.trainer.close()
    gain = both.counts["judged_gain_millitokens"]
    assert both.counts["judged_requests"] == 40
    assert gain > 40 * 300
    assert both.counts["versions_offered"] == both.counts["rollbacks"] == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    # A person chooses the start: there is nothing to gain.
    VersionFolder(out, pair.drafter, pair.target).use(None, who="person")
    both.trainer._looked = 0
    both.trainer.step()
    both.serve(range(140, 150))
    assert both.counts["judged_gain_millitokens"] == gain


def test_watch_wants_a_folder_that_is_there(pair, tmp_path):
    config = TrainerConfig(str(pair.drafter), str(pair.target), "watch", out=str(tmp_path / "none"))
    with pytest.raises(TrainError, match=r"no folder .*none whose version .* drop the option\.$"):
        TrainerProcess(config, EngineLink(pair.sizes)).start()
    assert not (tmp_path / "none").exists()


def test_weights_that_are_not_finite_are_never_staged(pair):
    both = Both(pair)
    updater = both.trainer.adaptation.updater
    update, broken = updater.update, []

    def breaks(action, train_batches):
        report = update(action, train_batches)
        if not broken:
            broken.append(updater.drafter.norm.weight.data[1].fill_(float("nan")))
        return report

    updater.update = breaks
    taken = both.serve(range(32))
    assert broken and both.counts["versions_refused_weights"] == 1
    # Training went on from before.
    assert taken and all(torch.isfinite(each).all() for each in taken[-1].tensors.values())
    assert both.counts["updates_full"] == len(taken) + 1


def test_a_version_without_a_gain_is_not_offered(pair):
    both = Both(pair, policy="fixed", lr=0.3)
    both.serve(range(40))
    assert both.counts["versions_refused_not_better"] > 0


def test_a_fall_of_tau_brings_the_last_good_version_back(pair):
    both = Both(pair, policy="fixed")
    taken = both.serve(range(30))
    assert taken
    both.trainer.adaptation.pool.good = both.trainer.adaptation.pool.origin
    _, request = pair.request(100)
    found = None
    for _ in range(20):
        both.engine.offer(None, replace(request, tokens=11))
        both.trainer.step()
        found = found or staged(both.engine)
    assert found.number == 0 and found.action is Action.FULL
    assert both.counts["rollbacks"] >= 1


def test_rows_of_another_target_are_dropped(pair):
    both = Both(pair)
    record, request = pair.request(0)
    narrow = replace(record, states=record.states[:, :-3].clone())
    both.engine.offer(narrow, request)
    assert both.trainer.step() and both.counts["dropped_records"] == 1


def test_a_trainer_after_one_that_died_goes_on_from_what_serves(pair):
    both = Both(pair, policy="fixed")
    taken = both.serve(range(30))
    after = Both(pair, both.engine, policy="fixed")
    current = after.trainer.adaptation.pool.current
    assert current.number == taken[-1].number
    assert all(torch.equal(current.tensors[n], t) for n, t in taken[-1].tensors.items())
    assert staged(both.engine) is None  # it serves already
    more = after.serve(range(30, 60))
    assert all(each.number > taken[-1].number for each in more)


def test_what_serves_is_lost_with_a_torn_version_and_the_start_is_staged_whole(pair):
    both = Both(pair)
    both.serve(range(16))
    both.trainer.source.staging._head[0] += 1
    after = Both(pair, both.engine)
    found = staged(both.engine)
    assert (found.number, found.action) == (0, Action.FULL)
    delivered = checkpoint.load(pair.drafter)
    assert all(torch.equal(found.tensors[n], p) for n, p in delivered.named_parameters())
    assert after.trainer.adaptation.number >= 1


def test_state_is_kept_in_the_folder(pair, tmp_path):
    out = tmp_path / "out"
    both = Both(pair, policy="gain", out=str(out), seconds=0)
    both.serve(range(60))
    both.trainer.close()
    updater, policy = both.trainer.adaptation.updater, both.trainer.adaptation.policy
    after = Both(pair, policy="gain", out=str(out))  # another engine
    again, found = after.trainer.adaptation.updater, after.trainer.adaptation.policy
    for (name, one), (_, two) in zip(
        updater.drafter.named_parameters(), again.drafter.named_parameters()
    ):
        assert torch.equal(one, two), name
        for kind, moment in updater.optimizer.state[one].items():
            assert torch.equal(moment, again.optimizer.state[two][kind]), (name, kind)
    assert (found.events, found.costs) == (policy.events, policy.costs)
    assert found.belief.mean == policy.belief.mean and found.account == policy.account
    assert updater.steps == again.steps
    earlier, later = both.trainer.adaptation, after.trainer.adaptation
    assert later.compared == earlier.compared > 0
    assert later.usual.known == earlier.usual.known and later.usual.known[1] > 0
    # The version that was current is offered to the new engine.
    folder = VersionFolder(out, pair.drafter, pair.target)
    if folder.chosen().get("version"):
        loaded = checkpoint.load(folder.current()[0])
        offered = staged(after.engine)
        parameters = dict(loaded.named_parameters())
        assert all(torch.equal(t, parameters[name]) for name, t in offered.tensors.items())
    assert after.serve(range(60, 80)) is not None


def test_a_start_leaves_what_is_current_as_it_is(pair, tmp_path):
    """Neither a new engine nor another trainer of the same one is a reason to choose anew."""
    out = tmp_path / "out"
    both = Both(pair, policy="fixed", out=str(out), seconds=0)
    taken = both.serve(range(30))
    both.trainer.adaptation.pool.call_good()
    both.trainer.close()
    chosen = VersionFolder(out).chosen()
    assert chosen["version"] and taken
    for engine in (None, both.engine):
        after = Both(pair, engine, policy="fixed", out=str(out), seconds=0)
        assert (staged(after.engine) is None) == (engine is both.engine)
        after.trainer._looked = 0
        after.trainer.step()
        assert staged(after.engine) is None
        assert VersionFolder(out).chosen() == chosen
        after.trainer.close()
        assert VersionFolder(out).chosen() == chosen


def test_what_a_person_left_is_not_trained_on_from(pair, tmp_path):
    out = tmp_path / "out"
    both = Both(pair, out=str(out), seconds=0)
    both.serve(range(16))
    both.trainer.close()
    VersionFolder(out).use(None, who="person")
    after = Both(pair, out=str(out), seconds=0).trainer.adaptation
    assert after.pool.current is after.training is after.pool.origin
    delivered = dict(checkpoint.load(pair.drafter).named_parameters())
    for name, value in after.updater.drafter.named_parameters():
        assert torch.equal(value, delivered[name])


def test_a_state_of_others_or_a_broken_one_is_told_of_and_left(pair, tmp_path, caplog):
    out = tmp_path / "out"
    both = Both(pair, out=str(out), seconds=0)
    both.serve(range(10))
    both.trainer.close()
    whole = (out / state.FILE).read_bytes()
    (out / "current.json").unlink()
    adaptation = both.trainer.adaptation
    with pytest.raises(TrainError, match="another target"):
        state.restore(out, adaptation, {"target": "x"})
    (out / state.FILE).write_bytes(whole[:-10])
    after = Both(pair, out=str(out))
    assert "training begins anew" in caplog.text
    assert after.trainer.adaptation.updater.steps == 0
    after.trainer.close()
    # A policy is made of policies and numbers, and runs nothing else.
    evil = state.pickle.dumps(os.getcwd)
    with pytest.raises(state.pickle.UnpicklingError, match="no part of a policy"):
        state._load(evil)


@pytest.mark.parametrize("name", ["gain", "paper", "always", "fixed", "watch"])
def test_every_policy_goes_on_from_where_it_was(pair, tmp_path, name):
    both = Both(pair, policy=name, actions="heads")
    both.serve(range(40))
    state.save(tmp_path, both.trainer.adaptation, {})
    after = Both(pair, policy=name, actions="heads").trainer.adaptation
    assert state.restore(tmp_path, after, {})
    told = [
        [each.decide(pair.request(number)[1]) for number in range(40, 120)]
        for each in (both.trainer.adaptation.policy, after.policy)
    ]
    assert told[0] == told[1] and (
        any(each.update for each in told[0]) or name in ("watch", "gain")
    )


def test_versions_are_written_and_a_person_may_choose(pair, tmp_path):
    out = tmp_path / "out"
    both = Both(pair, out=str(out), seconds=0)
    both.serve(range(9))
    both.trainer.close()
    folder = VersionFolder(out, pair.drafter, pair.target)
    ((name, facts),) = folder.listed().items()
    assert facts["parent"] is None and facts["action"] == "full" and facts["rows"] > 0
    assert folder.chosen() == {**folder.chosen(), "version": name, "by": "trainer"}
    folder.use(None, who="person")
    trainer = both.trainer
    trainer._looked = 0
    trainer.step()
    assert trainer.adaptation.pool.current is trainer.adaptation.pool.origin
    assert staged(both.engine).number == 0
    folder.use(name, who="person")
    trainer._looked = 0
    trainer.step()
    found = staged(both.engine)
    stored = dict(checkpoint.load(out / name).named_parameters())
    assert all(torch.equal(t, stored[key]) for key, t in found.tensors.items())


def test_wrong_configs_are_one_sentence(pair, tmp_path):
    with pytest.raises(TrainError, match="no policy 'osd'"):
        Both(pair, policy="osd")
    Both(pair, out=str(tmp_path / "out")).trainer.writer.folder.lock()
    with pytest.raises(TrainError, match="Another engine or trainer"):
        Both(pair, out=str(tmp_path / "out"))
    config = TrainerConfig("a", "b", out="c", device="cuda:1")
    assert TrainerConfig.from_json(config.to_json()) == config


def wait(what, seconds: float = 240.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_a_trainer_that_is_killed_harms_nobody(pair, tmp_path, caplog):
    """Killed at four moments; serving goes on, another one follows, and then it is left alone."""
    out, draw = tmp_path / "out", random.Random(1)
    engine = EngineLink(pair.sizes)
    config = TrainerConfig(
        str(pair.drafter), str(pair.target), "always", "all", lr=3e-3, out=str(out), seconds=0
    )
    process = TrainerProcess(config, engine, waits=(0.0, 0.01, 0.02))
    process.start()
    with pytest.raises(TrainError, match="Another engine or trainer"):
        TrainerProcess(config, EngineLink(pair.sizes)).start()
    number, taken = 0, []

    def serve() -> bool:
        """One request; whether a version came. No call waits for the trainer."""
        nonlocal number
        began = time.perf_counter()
        engine.offer(*pair.request(number))
        found = engine.staged()
        assert time.perf_counter() - began < 0.5
        number += 1
        if found is not None:
            assert all(torch.isfinite(each).all() for each in found.tensors.values())
            engine.took(found)
            taken.append(found.number)
        return found is not None

    pids = set()
    for death in range(4):
        pid = wait(lambda: process.pid not in pids and process.pid)
        pids.add(pid)
        if death == 0:
            assert wait(lambda pid=pid: os.getpriority(os.PRIO_PROCESS, pid) == 19)
        else:
            since = time.monotonic()
            wait(lambda since=since: time.monotonic() - engine.silence > since)  # it lives
            assert shared_by(pid) == {"/memfd:specblock-adapt (deleted)"}
            wait(serve)
        time.sleep(0.3 * draw.random())
        os.kill(pid, signal.SIGKILL)
    wait(lambda: process.gave_up)
    assert process.pid is None and "serving goes on" in caplog.text
    assert taken == sorted(set(taken)) and engine.counts["trainer_restarts"] == 3
    process.stop()
    folder = VersionFolder(out, pair.drafter, pair.target)
    assert folder.current()[1] is None
    folder.lock()  # nobody holds it, and what was half-written goes
    assert not [path for path in out.iterdir() if path.name.startswith(".") and path.is_dir()]


ENGINE = """
import sys, time
from pathlib import Path
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.drafters.specblock import checkpoint
drafter, target = sys.argv[1:]
link = EngineLink(LinkSizes(shapes_of(checkpoint.read_config(drafter)), 32))
process = TrainerProcess(TrainerConfig(drafter, target), link)
process.start()
while link.silence > 100:
    time.sleep(0.02)
print(process.pid, "vllm" in sys.modules, flush=True)
time.sleep(60)
"""


def test_the_trainer_ends_with_an_engine_that_is_killed(pair):
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, pair.drafter, pair.target], stdout=subprocess.PIPE, text=True
    )
    pid, has_vllm = engine.stdout.readline().split()
    assert has_vllm == "False"
    assert not [path for path in mapped_by(int(pid)) if "/vllm/" in path]
    for process in (int(pid), engine.pid):
        assert shared_by(process) == {"/memfd:specblock-adapt (deleted)"}
    engine.kill()
    engine.wait()
    wait(lambda: not alive(int(pid)), 10)


def mapped_by(pid: int) -> set[str]:
    """Files and shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def shared_by(pid: int) -> set[str]:
    """Memory that a process shares with others: none that has a name would go with it."""
    return {path for path in mapped_by(pid) if path.startswith(("/dev/shm", "/memfd"))}


def test_a_trainer_that_cannot_start_is_not_tried_again(pair, tmp_path, capfd):
    shapes = pair.sizes
    (pair.target / "model.safetensors").unlink()
    engine = EngineLink(shapes)
    process = TrainerProcess(TrainerConfig(str(pair.drafter), str(pair.target)), engine)
    process.start()
    wait(lambda: process.gave_up)
    assert engine.counts["trainer_restarts"] == 0
    said = capfd.readouterr().err
    assert "has 0 tensors called" in said and "Traceback" not in said
    process.stop()
