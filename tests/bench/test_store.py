"""Results that go on after a kill, and never with those of other settings or other code."""

from __future__ import annotations

import json

import pytest

from vllm_specblock.bench import store as module
from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Question, Unit
from vllm_specblock.bench.store import Answer, Store

SETTINGS = {"dtype": "float32", "temperature": (0.0,), "method a": 1, "set s": 1}
QUESTIONS = (Question("x", ("1", "2")), Question("y", ("3", "4")))
FIRST, SECOND = UNITS = [Unit(number, 0.0, "s", QUESTIONS) for number in (0, 1)]
ANSWER = Answer([[[1], [2]], [[3], [4]]], 1.5, 2.5, 4, 5, 6)


@pytest.fixture
def folder(tmp_path):
    """The first of two units, answered by a and b."""
    store = Store(tmp_path / "out", UNITS, SETTINGS)
    store.add(FIRST, {"a": ANSWER, "b": ANSWER})
    store.note_engine("a", {"runner": "V2"})
    return tmp_path / "out"


def test_a_run_resumes_and_drops_a_line_that_a_kill_cut_off(folder):
    path = folder / "units.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    store = Store(folder, UNITS, SETTINGS)
    assert path.read_text() == whole
    assert store.missing(FIRST, ["a", "b", "c"], ["a"]) == ["c"]
    assert store.missing(SECOND, ["a", "b"], ["a"]) == ["a", "b"]
    (record,) = store.records
    assert record.answers["a"] == ANSWER and record.unit == FIRST
    assert store.head["engines"] == {"a": {"runner": "V2"}}
    store.add(SECOND, {"a": ANSWER})
    assert len(Store(folder, UNITS, SETTINGS).records) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "other revision: give another"),
        ({"dtype": "bfloat16", "temperature": (1.0,)}, "other dtype, temperature: give another"),
        ({"method a": 2}, "other method a: give another --out, or delete the folder"),
        ({"more": 1}, "other more:"),
    ],
)
def test_other_settings_and_other_code_are_refused(folder, changes, says, monkeypatch):
    if not changes:
        monkeypatch.setattr(module, "revision", lambda *_, **__: "f" * 40)
    before = (folder / "run.json").read_text()
    with pytest.raises(BenchError, match=says):
        Store(folder, UNITS, SETTINGS | changes)
    assert (folder / "run.json").read_text() == before


def test_methods_and_sets_may_be_added(folder):
    others = {name: value for name, value in SETTINGS.items() if name != "method a"}
    added = {"method b": 2, "set t": 3}
    assert len(Store(folder, UNITS, others | added).records) == 1
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert settings.items() >= {"method a": 1, "method b": 2, "set s": 1, "set t": 3}.items()
    with pytest.raises(BenchError, match="other method b"):
        Store(folder, UNITS, SETTINGS | {"method b": 3})


@pytest.mark.parametrize("content", ['{"settings": {"dty', "[]", "{}", "\xff"])
@pytest.mark.parametrize("name", ["run.json", "units.jsonl"])
def test_a_damaged_file_is_one_sentence(folder, name, content):
    (folder / name).write_text(content + "\n", encoding="latin-1")
    with pytest.raises(BenchError, match=f"{folder} has damaged results: give another --out."):
        Store(folder, UNITS, SETTINGS)
