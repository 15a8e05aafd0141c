"""Engines that stand still while they are not asked, and never outlive who made them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.adapting import wait
from support.fake_engine import COMMAND
from support.processes import alive, state

from vllm_specblock.bench.process import EngineFailed, end_all

JOB = {"prompts": [[1, 2]], "seeds": [0], "temperature": 0.0, "max_tokens": 2}


def test_it_stands_still_between_two_answers(start):
    engine = start()
    wait(lambda: state(engine.process.pid) == "T")
    assert engine.ask(JOB)["ids"] == [[6, 7]]
    wait(lambda: state(engine.process.pid) == "T")
    end_all([engine])
    assert state(engine.process.pid) == "" and engine.guard.poll() == 0


def test_why_it_did_not_start_or_answer(start):
    with pytest.raises(EngineFailed, match="The engine of it failed: no such head"):
        start({"refuses": "no such head."})
    code = "import sys; print('Traceback', file=sys.stderr); sys.exit('the last word')"
    with pytest.raises(EngineFailed, match="it ended with code 1, after: the last word"):
        start(command=(sys.executable, "-c", code))
    engine = start()
    engine.process.kill()
    with pytest.raises(EngineFailed, match="it was killed by SIGKILL"):
        engine.ask(JOB)


@pytest.mark.parametrize("stubborn", [False, True])
def test_whatever_it_started_ends_with_it(start, stubborn, monkeypatch):
    monkeypatch.setattr("vllm_specblock.bench.process.GRACE", 0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = (
        (deaf if stubborn else "") + "\nimport subprocess, sys\nsys.stdin.readline()\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\nsys.stdin.read()"
    )
    engine = start(command=(sys.executable, "-c", code))
    child = engine.facts["child"]
    wait(lambda: state(child) == "T")  # it stands still, too
    end_all([engine])
    wait(lambda: not alive(child))
    assert state(engine.process.pid) == ""


@pytest.mark.parametrize("busy", [False, True])
def test_it_goes_when_its_maker_is_killed(tmp_path, journal, busy):
    """Stopped or at work; the maker has no time to do anything about it."""
    code = f"""if True:
        from pathlib import Path
        from vllm_specblock.bench.process import EngineProcess
        engine = EngineProcess(
            "it", {{"speculative_config": {{"sleep": 600}}}}, {{}}, Path("it.log"), {COMMAND!r}
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
    wait(lambda: state(pids[0]) == ("S" if busy else "T"))
    maker.kill()
    maker.wait()
    for pid in pids:
        wait(lambda pid=pid: not alive(pid))
