"""Engines stand still while they are not asked, end with their maker, and answer side by side."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console
from support.adapting import wait
from support.fake_engine import COMMAND
from support.processes import alive, state
from support.scripts import TARGET
from transformers import AutoTokenizer

from vllm_specblock.bench.live import TINT, Answer, ask_together, shown
from vllm_specblock.bench.process import EngineFailed, end_all, job_of

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


def test_a_stopped_engine_of_many_threads_exits_by_itself(start):
    """Another thread may take the signal, while the main thread waits for a job."""
    code = """if True:
        import signal, sys, threading, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        for _ in range(32):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        print("{}", flush=True)
        sys.stdin.readline()
        sys.stdin.read()
    """
    engine = start(command=(sys.executable, "-c", code))
    wait(lambda: state(engine.process.pid) == "T")
    end_all([engine])
    assert engine.process.returncode == 7


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


def letters(ids: list[int]) -> str:
    return "".join(chr(94 + i) for i in ids)


def tinted(answer: Answer) -> list[str]:
    return [answer.text.plain[s.start : s.end] for s in answer.text.spans if s.style == TINT]


def test_engines_take_turns_and_every_step_is_heard(start):
    engines = [start({"step": 1}), start({"step": 3})]
    ask_together(engines, job_of([[0]], 4), [Answer("", letters), Answer("", letters)])
    plain, ours = (Answer("", letters) for _ in range(2))
    ask_together(engines, job_of([[0]], 10), [plain, ours])
    assert plain.text.plain == ours.text.plain == "abcdefghij"
    assert (plain.steps, ours.steps) == ([1] * 10, [3, 3, 3, 1])
    assert tinted(plain) == [] and tinted(ours) == ["ab", "de", "gh"]
    assert (plain.tau, ours.tau) == (1.0, 7 / 3)
    # Time counts while an engine runs: ten steps of 52 ms, and four.
    assert plain.seconds > 0.45 > 0.2 < ours.seconds < plain.seconds


def test_half_a_letter_waits_for_its_other_half():
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text, seen = "a 你 b", []
    answer = Answer("", tokenizer.decode)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        answer.hear([token])
        seen.append(answer.text.plain)
    assert seen[-1] == text and len(set(seen)) < len(seen)
    assert not any("\ufffd" in each for each in seen)


def test_a_pipe_gets_equal_answers_once_and_others_both():
    out = io.StringIO()
    console = Console(file=out, width=40, highlight=False)
    one, two = Answer("plain", letters), Answer("ours", letters)
    with shown(console, "why?", [one, two]):
        one.hear([3, 4])
        two.hear([3, 4])
        two.seconds = 4.0
    assert out.getvalue().splitlines() == [
        *("", "> why?", "ab", "[plain: 2 tokens, 0.0 tokens/s, τ 1.00]"),
        "[ours: 2 tokens, 0.5 tokens/s, τ 1.00]",
    ]
    with shown(console, "why?", [one, two]):
        two.hear([5])
    assert out.getvalue().splitlines()[6:9] == ["> why?", "ab", "abc"]
