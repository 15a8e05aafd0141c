"""Sections of a step: what each takes without those inside it, and the table of them."""

from __future__ import annotations

import json

import pytest
import step_parts
from lib.sections import ATTENTION, MODEL, ORDER, Sections
from support.engines import TARGET


class Clock:
    """Time passes only where somebody says so; processor time twice as fast."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time, 2 * self.time


class Model:
    def __init__(self, clock):
        self.clock = clock

    def forward(self, layers):
        self.clock.time += 1
        for _ in range(layers):
            self.attend()
        self.clock.time += 2
        return layers

    def attend(self):
        self.clock.time += 10


def test_what_is_inside_counts_there_alone():
    clock = Clock()
    model, sections = Model(clock), Sections(clock)
    sections.wrap(model, "forward", MODEL)
    sections.wrap(model, "attend", ATTENTION)
    sections.wrap(model, "not_there", ATTENTION)
    sections.wrap(None, "forward", ATTENTION)
    assert model.forward(3) == 3
    clock.time += 100  # nobody's
    assert sections.take() == {MODEL: [3, 6], ATTENTION: [30, 60]}
    assert sections.take() == {}


def test_a_section_that_fails_is_closed():
    clock = Clock()
    model, sections = Model(clock), Sections(clock)
    sections.wrap(model, "forward", MODEL)
    with pytest.raises(TypeError):
        model.forward("three")
    clock.time += 5
    assert sections.take() == {MODEL: [1, 2]}


def test_figures_of_a_step():
    answers = [
        {"ids": [[1] * 30], "steps": 10, "sections": {MODEL: [s, 2 * s], ATTENTION: [0.01, 0.01]}}
        for s in (0.1, 0.3, 0.2)
    ]
    found = step_parts.summary(answers)
    assert found["sections"][MODEL] == [pytest.approx(20), pytest.approx(40)]
    assert found["step"] == [pytest.approx(21), pytest.approx(41)] and found["tokens"] == 3
    text = step_parts.table({"one": found, "two": found | {"step": [42.0, 50.0]}})
    assert "| linears, rest of model | 20.00 (40.00) | 20.00 (40.00) |" in text
    assert "| × the first one's step | 1.00 | 2.00 |" in text


def test_real_engines(tmp_path, capsys):
    """The example target, without its drafter: every section of a step is found."""
    questions = tmp_path / "set.jsonl"
    questions.write_text(
        json.dumps({"id": "a", "turns": ["def main():\n    return 1\n\ndef"]}) + "\n"
    )
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = step_parts.AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_parts.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
        step_parts.main(
            str(TARGET), questions, None, 6, [1], 32, 0.0, 1, "float32", True, tmp_path / "out"
        )
    figures = json.loads((tmp_path / "out/step_parts.json").read_text())["1"]
    assert [*figures] == ["plain", "plain-v2", "ngram"]
    for name, each in figures.items():
        drafts = name == "ngram"
        taken = [section for section in ORDER if each["sections"][section][0] > 0]
        assert len(taken) == (9 if drafts else 6), (name, taken)
        assert each["tokens"] > (1.05 if drafts else 0.9)
    assert "batch 1, T = 0, float32" in capsys.readouterr().out
