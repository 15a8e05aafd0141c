"""Answers side by side: what is tinted, who runs when, and what a pipe gets."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from vllm_specblock.bench.live import TINT, Answer, ask_together, shown
from vllm_specblock.bench.process import job_of

TARGET = Path(__file__).resolve().parents[2] / "examples/tiny_pair/target"


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
