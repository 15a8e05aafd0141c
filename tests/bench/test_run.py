"""Whole benchmarks over stand-ins for engines: turns, resuming, failures, files."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_specblock.bench import run
from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.process import EngineFailed
from vllm_specblock.bench.questions import read_sets, units
from vllm_specblock.bench.results import write_results
from vllm_specblock.bench.run import measure
from vllm_specblock.drafters.common.config import CheckpointError

FAST = {"seconds": 0.5}


def quiet(bench):
    """Measure it, and return the messages."""
    said = []
    measure(bench, said.append)
    return said


def jobs(journal):
    """Who was asked what, in order."""
    return [json.loads(line) for line in journal.read_text().splitlines()]


def test_engines_take_turns_chat_by_chat(make_bench, journal):
    bench = make_bench({"ours": FAST, "other": {}})
    assert quiet(bench) == [] and not bench.failures
    done = jobs(journal)
    warm, done = done[:4], done[4:]
    assert [job["max_tokens"] for job in warm] == [4] * 4
    pids = [job["pid"] for job in warm]  # plain, plain-v2, ours, other
    assert len({*pids}) == 4
    found = list(bench.store.units.values())
    turns_of = [len(unit.questions[0].turns) for unit in found]
    assert [(u.set, u.questions[0].id, turns) for u, turns in zip(found, turns_of)] == [
        *(("chats", "a", 2), ("single", "q0", 1), ("chats", "b", 2), ("single", "q1", 1)),
        *(("single", f"q{number}", 1) for number in (2, 3, 4)),
    ]
    for number, turns in enumerate(turns_of):
        turn, done = done[: 4 * turns], done[4 * turns :]
        start = number % 4
        order = pids[start:] + pids[:start]
        assert [job["pid"] for job in turn] == [pid for pid in order for _ in range(turns)]
        first = turn[::turns]
        assert len({json.dumps([job["prompts"], job["seeds"]]) for job in first}) == 1
    assert not done and len(bench.store.records) == 7


def test_rounds_and_temperatures_ask_everything_again(make_config):
    config = make_config(questions=2, rounds=2, temperature=(0.0, 1.0))
    found = list(units(config, read_sets(config)))
    assert len({unit.key for unit in found}) == len(found) == 2 * 2 * 4
    assert [unit.round for unit in found] == [0] * 8 + [1] * 8
    assert [unit.temperature for unit in found] == [0.0, 1.0] * 8


def test_a_chat_goes_on_with_the_engines_own_answer(make_bench, journal):
    bench = make_bench({"ours": {"shift": 7}}, questions=1, max_new_tokens=2)
    quiet(bench)
    tokens = bench.reader.tokens
    second = [job for job in jobs(journal) if len(job["prompts"][0]) > len(tokens.raw("one")) + 2]
    assert len(second) == 3
    for job in second:
        own = sum(tokens.raw("one")) + (7 if job["method"] else 0)
        said = tokens.said([own % 1000 + 3, (own + 1) % 1000 + 3])
        assert job["prompts"] == [tokens.raw(f"one{said}two")]


def test_methods_that_come_later_have_plain_vllm_beside_them(make_bench, journal):
    quiet(make_bench({"a": FAST, "b": FAST}))
    bench = make_bench({"a": FAST, "b": FAST, "c": FAST})
    quiet(bench)
    assert [{*record.answers} for record in bench.store.records] == (
        [{"plain", "plain-v2", "a", "b"}] * 7 + [{"plain", "plain-v2", "c"}] * 7
    )
    assert len({job["pid"] for job in jobs(journal)}) == 4 + 3


def test_who_dies_leaves_the_others_and_its_answers(make_bench, journal):
    bench = make_bench({"ours": FAST, "ill": {"dies_at": 4}})
    (said,) = quiet(bench)
    assert said.startswith("The engine of ill failed: it ended with code 3, after: out of luck")
    assert bench.failures == {"ill": said.removesuffix(" The others go on.")}
    names = [{*record.answers} for record in bench.store.records]
    assert names == [{"plain", "plain-v2", "ours", "ill"}] * 2 + [{"plain", "plain-v2", "ours"}] * 5
    # Called again, it goes on with plain vLLM beside it, and without those that have finished.
    journal.write_text("")
    bench = make_bench({"ours": FAST, "ill": {"dies_at": 4}})
    quiet(bench)
    assert {job["method"] for job in jobs(journal)} == {None, "ill"}
    assert sum("ill" in record.answers for record in bench.store.records) == 4


def test_nothing_goes_without_plain_vllm(make_bench, make_config):
    define = {"plain": {"speculative": {}, "env": {"FAKE_JOURNAL": "/nowhere/x"}}}
    bench = make_bench({"ours": FAST}, define=define | make_config().model_dump()["define"])
    with pytest.raises(EngineFailed, match="The engine of plain failed: it ended with code 1"):
        quiet(bench)
    assert bench.store.records == []


def test_a_machine_that_is_full_says_so(make_bench, monkeypatch):
    left = (SimpleNamespace(available=gib << 30) for gib in (10, 7, 2))
    monkeypatch.setattr(run.psutil, "virtual_memory", lambda: next(left))
    says = r"2 engines are alive, 2\.0 GiB .* one takes up to 5\.0: give fewer --method;"
    with pytest.raises(BenchError, match=says):
        quiet(make_bench({"ours": FAST}))


@pytest.mark.parametrize("place", ["model", "second_drafter"])
def test_a_drafter_that_no_engine_could_load_is_found_first(place, make_bench, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Llama"]}')
    broken = {"model": str(tmp_path)}
    how = broken if place == "model" else {"kind": "ngram", "second_drafter": broken}
    with pytest.raises(CheckpointError, match=r"config\.json is of architecture \['Llama'\]"):
        make_bench({"ours": how})


def test_all_files_of_a_run(make_bench):
    bench = make_bench({"ours": FAST, "other": {"shift": 1}}, rounds=2)
    quiet(bench)
    text, files = write_results(bench)
    assert [path.name for path in files] == ["results.json", "table.md"]
    assert all(path.stat().st_size for path in files)
    assert files[1].read_text() == text
    # Seconds per token: plain 1, plain-v2 2, ours 1/2, other 2; 2 ms per step; τ 3: an answer's
    # four tokens are the prompt's one and three of a step.
    row = "1.00 | 1.0 | 1.00 | –"
    assert f"| plain (fastest plain) | {row} | {row} | {row} | – |" in text
    assert "| plain-v2 | 0.50 (0.50–0.50) | 0.5 | 1.00 | – |" in text
    # 2 questions of 2 turns and 5 of one, each twice.
    ours, other = "2.00 (2.00–2.00) | 2.0 | 3.00 | 2.00", "0.50 (0.50–0.50) | 0.5 | 3.00 | 2.00"
    assert f"| ours | {ours} | {ours} | {ours} | 0 of 18 |" in text
    assert f"| other | {other} | {other} | {other} | 18 of 18 |" in text
    whole = json.loads(files[0].read_text())
    assert whole["fastest_plain"] == "plain" and whole["rounds"] == 2
    ours = [each for each in whole["figures"] if each["method"] == "ours"]
    speedups = {each["set"]: each["speedup"] for each in ours}
    assert speedups == dict.fromkeys(("chats", "single", "mean"), 2.0)
    assert whole["commands"] and whole["settings"]["machine"]["cpu"]
    assert whole["settings"]["revision"] != ""
