"""Answers side by side: what is tinted, who runs when, and what a pipe gets."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from vllm_specblock.bench.live import TINT, Answer, ask_together, shown
from vllm_specblock.bench.process import EngineProcess, end_all, job_of

TARGET = Path(__file__).resolve().parents[2] / "examples/tiny_pair/target"

# Speaks as `vllm_specblock/engine/offline/answering.py` does: so many tokens a step, then the end.
CHILD = """
import json, sys, time
each = json.loads(sys.stdin.readline())["each"]
say = lambda what: print(json.dumps(what), flush=True)
say({"runner": "none"})
for job in map(json.loads, sys.stdin):
    ids = list(range(job["max_tokens"]))
    for first in range(0, len(ids), each):
        until = time.process_time() + 0.05  # a sleep would go on while it is stopped
        while time.process_time() < until:
            pass
        say({"said": [0, ids[first : first + each]]})
    say({"ids": [ids], "wall": 0.5, "cpu": 0.25, "counters": {}})
"""


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


@pytest.fixture
def start(tmp_path):
    started: list[EngineProcess] = []

    def go(each: int) -> EngineProcess:
        command, log = [sys.executable, "-c", CHILD], tmp_path / f"{len(started)}.log"
        started.append(EngineProcess("e", {"each": each}, {}, log, command))
        return started[-1]

    yield go
    end_all(started)


def tinted(answer: Answer) -> list[str]:
    return [answer.text.plain[s.start : s.end] for s in answer.text.spans if s.style == TINT]


def test_engines_take_turns_and_every_step_is_heard(start):
    engines = [start(1), start(3)]
    for engine in engines:
        engine.wait()
    ask_together(engines, job_of([[1]], 4), [Answer("", letters), Answer("", letters)])
    plain, ours = (Answer("", letters) for _ in range(2))
    ask_together(engines, job_of([[1]], 10), [plain, ours])
    assert plain.text.plain == ours.text.plain == "abcdefghij"
    assert (plain.steps, ours.steps) == ([1] * 10, [3, 3, 3, 1])
    assert tinted(plain) == [] and tinted(ours) == ["ab", "de", "gh"]
    assert (plain.tau, ours.tau) == (1.0, 7 / 3)
    # Time counts while an engine runs: ten steps of 50 ms, and four.
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
        one.hear([0, 1])
        two.hear([0, 1])
        two.seconds = 4.0
    assert out.getvalue().splitlines() == [
        *("", "> why?", "ab", "[plain: 2 tokens, 0.0 tokens/s, τ 1.00]"),
        "[ours: 2 tokens, 0.5 tokens/s, τ 1.00]",
    ]
    with shown(console, "why?", [one, two]):
        two.hear([2])
    assert out.getvalue().splitlines()[6:9] == ["> why?", "ab", "abc"]
