"""Results that go on after a kill, and never with those of other settings or other code."""

from __future__ import annotations

import json

import pytest

from vllm_specblock.bench import store as module
from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Question, Unit
from vllm_specblock.bench.store import Answer, Store

SETTINGS = {"dtype": "float32", "temperature": (0.0,), "methods": {"a": 1}, "sets": {"s": 1}}
QUESTIONS = (Question("x", ("1", "2")), Question("y", ("3", "4")))
FIRST, SECOND = (Unit(number, 0.0, "s", QUESTIONS) for number in (0, 1))
ANSWER = Answer(8, 1.5, 2.5, 4, 5, 6, [[[1], [2]], [[3], [4]]])


@pytest.fixture
def folder(tmp_path):
    """The first of two units, answered by a and b."""
    store = Store(tmp_path / "out", SETTINGS)
    store.add(FIRST, {"a": ANSWER, "b": ANSWER})
    store.note_engine("a", {"runner": "V2"})
    return tmp_path / "out"


def test_a_run_resumes_and_drops_a_line_that_a_kill_cut_off(folder):
    path = folder / "units.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    store = Store(folder, SETTINGS)
    assert path.read_text() == whole
    assert store.missing(FIRST, ["a", "b", "c"], ["a"]) == ["c"]
    assert store.missing(SECOND, ["a", "b"], ["a"]) == ["a", "b"]
    (record,) = store.records
    assert record.answers["a"] == ANSWER and record.set == "s"
    assert store.head["engines"] == {"a": {"runner": "V2"}}
    store.add(SECOND, {"a": ANSWER})
    assert len(Store(folder, SETTINGS).records) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "bfloat16", "temperature": (1.0,)}, "other dtype, temperature: give another"),
        ({"methods": {"a": 2}}, "other methods: a: give another --out, or delete the folder"),
        ({"more": 1}, "other more:"),
    ],
)
def test_other_settings_are_refused(folder, changes, says):
    before = (folder / "run.json").read_text()
    with pytest.raises(BenchError, match=says):
        Store(folder, SETTINGS | changes)
    assert (folder / "run.json").read_text() == before


def test_methods_and_sets_may_be_added(folder):
    added = {"methods": {"b": 2}, "sets": {"s": 1, "t": 3}}
    assert len(Store(folder, SETTINGS | added).records) == 1
    head = json.loads((folder / "run.json").read_text())
    assert head["settings"]["methods"] == {"a": 1, "b": 2}
    assert head["settings"]["sets"] == {"s": 1, "t": 3}
    with pytest.raises(BenchError, match="other methods: b"):
        Store(folder, SETTINGS | {"methods": {"b": 3}})


@pytest.mark.parametrize("content", ['{"settings": {"dty', "[]", "{}", "\xff"])
@pytest.mark.parametrize("name", ["run.json", "units.jsonl"])
def test_a_damaged_file_is_one_sentence(folder, name, content):
    (folder / name).write_text(content + "\n", encoding="latin-1")
    with pytest.raises(BenchError, match=f"{name} is damaged: give another --out."):
        Store(folder, SETTINGS)


def test_other_code_is_refused(folder, monkeypatch):
    monkeypatch.setattr(module, "revision", lambda *_, **__: "f" * 40)
    with pytest.raises(BenchError, match="other revision"):
        Store(folder, SETTINGS)
