"""Engines that stand still while they are not asked, and never outlive who made them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support import fake_engine
from support.processes import alive, state

from vllm_specblock.bench.process import EngineFailed, EngineProcess, end_all

FAKE = (sys.executable, fake_engine.__file__)
JOB = {"prompts": [[1, 2]], "seeds": [0], "temperature": 0.0, "max_tokens": 2}


def comes(condition, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def make(tmp_path, journal):
    made = []

    def one(speculative=None, command=FAKE, **env):
        arguments = {"speculative_config": speculative}
        engine = EngineProcess("it", arguments, env, tmp_path / "it.log", command)
        made.append(engine)
        engine.wait()
        return engine

    yield one
    end_all(made)


def test_it_stands_still_between_two_answers(make):
    engine = make()
    assert comes(lambda: state(engine.process.pid) == "T")
    assert engine.ask(JOB)["ids"] == [[6, 7]]
    assert comes(lambda: state(engine.process.pid) == "T")
    end_all([engine])
    assert state(engine.process.pid) == "" and engine.guard.poll() == 0


def test_why_it_did_not_start_or_answer(make):
    with pytest.raises(EngineFailed, match="The engine of it failed: no such head"):
        make({"refuses": "no such head."})
    code = "import sys; print('Traceback', file=sys.stderr); sys.exit('the last word')"
    with pytest.raises(EngineFailed, match="it ended with code 1, after: the last word"):
        make(command=(sys.executable, "-c", code))
    engine = make()
    engine.process.kill()
    with pytest.raises(EngineFailed, match="it was killed by SIGKILL"):
        engine.ask(JOB)


@pytest.mark.parametrize("stubborn", [False, True])
def test_whatever_it_started_ends_with_it(make, stubborn, monkeypatch):
    monkeypatch.setattr("vllm_specblock.bench.process.GRACE", 0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = (
        (deaf if stubborn else "") + "\nimport subprocess, sys\nsys.stdin.readline()\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\nsys.stdin.read()"
    )
    engine = make(command=(sys.executable, "-c", code))
    child = engine.facts["child"]
    assert comes(lambda: state(child) == "T")  # it stands still, too
    end_all([engine])
    assert comes(lambda: not alive(child)) and state(engine.process.pid) == ""


@pytest.mark.parametrize("busy", [False, True])
def test_it_goes_when_its_maker_is_killed(tmp_path, journal, busy):
    """Stopped or at work; the maker has no time to do anything about it."""
    code = f"""if True:
        from pathlib import Path
        from vllm_specblock.bench.process import EngineProcess
        engine = EngineProcess(
            "it", {{"speculative_config": {{"sleep": 600}}}}, {{}}, Path("it.log"), {FAKE!r}
        )
        engine.wait()
        print(engine.process.pid, engine.guard.pid, flush=True)
        if {busy}:
            engine.ask({JOB!r})
        input()
    """
    maker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert comes(lambda: state(pids[0]) == ("S" if busy else "T"))
    maker.kill()
    maker.wait()
    for pid in pids:
        assert comes(lambda pid=pid: not alive(pid))
