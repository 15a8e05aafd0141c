"""Figures of hand-made answers, worked out by hand, and folders of results after a kill."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_specblock.bench import store as module
from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Question, Unit
from vllm_specblock.bench.results import MEAN, figures_of, summarise
from vllm_specblock.bench.store import Answer, Record, Store

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


def answer(tokens, wall, cpu=1.0, steps=0, draft_ns=0, draft_steps=0):
    return Answer([[[1] * tokens]], wall, cpu, steps, draft_ns, draft_steps)


def record(name, number, plain, ours, unit=0, temperature=0.0, other=None):
    answers = {"plain": plain, "ours": ours}
    if other is not None:
        answers["plain-v2"] = other
    return Record(Unit(number, temperature, name, (Question(str(unit), ()),)), answers)


def benchmark(records, sets=("a",), plain=("plain",)):
    """A benchmark whose engines compute alike."""
    alike = {"runner": "V2", "dtype": "float32"}
    return SimpleNamespace(
        methods=[*plain, "ours"],
        plain=plain,
        sets=sets,
        config=SimpleNamespace(temperature=[0.0]),
        store=SimpleNamespace(
            records=records, head={"engines": dict.fromkeys([*plain, "ours"], alike)}
        ),
    )


def figures(records, sets=("a",)):
    found = summarise(benchmark(records, sets), records, "plain")
    return {(each.method, each.set): each for each in found}


def test_one_set_one_round():
    # Seconds per token: 1 and 1/2, 1 and 1/4, 2 and 1, each plain and ours: 2, 4 and 2 times.
    records = [
        record("a", 0, answer(10, 10.0, 8.0), answer(10, 5.0, 2.0, 4, 20_000_000, 4), 0),
        record("a", 0, answer(8, 8.0, 8.0), answer(20, 5.0, 5.0, 6, 40_000_000, 6), 1),
        record("a", 0, answer(4, 8.0, 3.0), answer(4, 4.0, 3.0, 2, 10_000_000, 2), 2),
    ]
    ours = figures(records)["ours", "a"]
    assert ours.speedup == 2.0
    # 0.8 / 0.2, 1 / 0.25, 0.75 / 0.75: 4, 4 and 1 times.
    assert ours.speedup_cpu == 4.0
    assert ours.throughput == pytest.approx(34 / 14) and ours.tokens == 34
    # Without the first token of each answer: 9, 19 and 3 tokens in 4, 6 and 2 steps.
    assert ours.tau == pytest.approx(31 / 12)
    # 70 ms in 12 steps.
    assert ours.draft_ms == pytest.approx(70 / 12)
    assert (ours.different, ours.outputs) == (1, 3)
    assert ours.speedup_rounds == [2.0]
    plain = figures(records)["plain", "a"]
    assert (plain.speedup, plain.speedup_cpu, plain.tau) == (1.0, 1.0, 1.0)
    assert plain.throughput == pytest.approx(22 / 26)
    assert plain.draft_ms is plain.different is None


def test_the_mean_over_sets():
    records = [
        record("a", 0, answer(1, 2.0), answer(3, 3.0, 1.0, 1, 2_000_000, 1)),
        record("a", 1, answer(1, 4.0), answer(3, 3.0, 1.0, 1, 2_000_000, 1)),
        record("b", 0, answer(1, 8.0), answer(5, 10.0, 1.0, 1, 4_000_000, 1)),
        record("b", 1, answer(1, 6.0), answer(5, 10.0, 1.0, 1, 4_000_000, 1)),
    ]
    found = figures(records, ["a", "b"])
    a, b, mean = (found["ours", name] for name in ("a", "b", MEAN))
    assert (a.speedup, b.speedup, mean.speedup) == (3.0, 3.5, 3.25)
    # Round 0: 2 and 4 times; round 1: 4 and 3 times.
    assert mean.speedup_rounds == [3.0, 3.5]
    assert (a.tau, b.tau, mean.tau) == (2.0, 4.0, 3.0)
    assert (a.throughput, b.throughput, mean.throughput) == (1.0, 0.5, 0.75)
    assert (a.draft_ms, b.draft_ms, mean.draft_ms) == (2.0, 4.0, 3.0)
    assert (mean.tokens, mean.outputs, mean.different) == (16, 4, 4)


def test_only_engines_that_took_turns_are_compared():
    apart = Record(Unit(0, 0.0, "a", (Question("1", ()),)), {"ours": answer(1, 100.0)})
    records = [record("a", 0, answer(1, 3.0), answer(1, 1.0)), apart]
    ours = figures(records)["ours", "a"]
    assert ours.speedup == 3.0 and ours.outputs == 2 and ours.different == 0
    assert figures([apart])["ours", "a"].speedup is None


def test_the_fastest_plain_is_so_by_the_median():
    # By the sum of times the second one would be slower.
    v1, v2 = (1.0, 1.0, 1.0), (0.5, 0.9, 9.0)
    records = [
        record("a", 0, answer(1, one), answer(1, 1.0), place, other=answer(1, two))
        for place, (one, two) in enumerate(zip(v1, v2))
    ]
    found, base = figures_of(benchmark(records, plain=("plain", "plain-v2")))
    assert base == "plain-v2" and found[0].speedup == 0.9
    assert figures_of(benchmark(records))[1] == "plain"
    with pytest.raises(BenchError, match="no answer of plain vLLM"):
        figures_of(benchmark([]))
