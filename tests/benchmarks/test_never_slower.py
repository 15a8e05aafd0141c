"""Served figures: which prompts a turn has, whose time is compared, and engines that take turns."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from itertools import islice

import never_slower
import pytest
from lib.engines import ENGINES
from lib.neighbour import BURST, PAUSE, bursts
from lib.turns import FIRST, LATER, figures, over, records_of, table, turns_of
from never_slower import Engines, default_methods
from support import fake_engine
from support.engines import DRAFTER, TARGET

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.methods import Method, resolve
from vllm_specblock.engine.metrics.acceptance import REQUESTS, STEPS, TOKENS


def test_turns_go_round_the_sets_and_no_prompt_recurs():
    sets = {name: [[100 * place + i] for i in range(9)] for place, name in enumerate("ab")}
    turns = [*turns_of(sets, batch=4, passes=2, tokens=10, first_steps=20)]
    assert [(turn.set, turn.phase) for turn in turns] == [
        *(("a", FIRST), ("b", FIRST)),
        *(("a", LATER), ("b", LATER)),
    ]
    for name in "ab":
        prompts = [ids for turn in turns if turn.set == name for (ids,) in turn.prompts]
        assert len({*prompts}) == 8 and {ids // 100 for ids in prompts} == {"ab".index(name)}
    jobs = [turn.job(0.8, 10) for turn in turns]
    assert len({seed for job in jobs for seed in job["seeds"]}) == 16
    assert all(job["ignore_eos"] and job["max_tokens"] == 10 for job in jobs)


def answer(cpu, ids, steps=4):
    counters = {TOKENS: len(ids), REQUESTS: 1, STEPS: steps}
    return {"ids": [ids], "cpu": cpu, "wall": 2 * cpu, "counters": counters}


def record(turn_set, phase, cpu, plain_cpu, **more):
    clocks = {"cpu": cpu, "wall": cpu, "plain_cpu": plain_cpu, "plain_wall": plain_cpu}
    counters = {TOKENS: 9, REQUESTS: 1, STEPS: 4}
    return {
        **{"set": turn_set, "phase": phase, "counters": counters, "tokens": 9, "different": 0},
        **clocks,
        **more,
    }


def test_answers_are_compared_on_the_same_model_runner():
    (turn,) = turns_of({"a": [[1]]}, 1, 1, 10, 20)
    answers = {
        "plain": answer(4.0, [1, 2]),
        "plain-v2": answer(5.0, [1, 3]),
        "ngram": answer(2.0, [1, 3]),
        "vllm-ngram": answer(3.0, [1, 3]),
        "gone": answer(1.0, [1, 3]),
    }
    runners = {"plain": "V1", "plain-v2": "V2", "ngram": "V2", "vllm-ngram": "V1"}
    found = records_of(turn, answers, runners)
    assert {name: each["different"] for name, each in found.items()} == {
        **{"plain": 0, "plain-v2": 0, "ngram": 0, "vllm-ngram": 1}
    }
    assert found["ngram"]["plain_cpu"] == 4.0 and found["ngram"]["plain_wall"] == 8.0
    alone = {"plain": "V1", "ngram": "V2"}
    assert records_of(turn, answers, alone | {"plain-v2": "V2"})["ngram"]["different"] == 0
    without = {name: each for name, each in answers.items() if name != "plain-v2"}
    assert records_of(turn, without, alone)["ngram"]["different"] == 1


def test_first_steps_and_later_ones_are_apart_and_turns_weigh_by_time():
    records = [
        record("a", FIRST, 2.0, 1.0),
        record("random", FIRST, 4.0, 1.0),
        record("a", LATER, 1.0, 3.0),
        record("random", LATER, 4.0, 2.0),
    ]
    found = figures(records)
    assert found["first_cpu"] == pytest.approx(2 / 6)
    assert found["later_wall"] == pytest.approx(5 / 5)
    assert found["sets"] == {"a": pytest.approx(4 / 3), "random": pytest.approx(3 / 8)}
    assert found["mean_of_sets"] == pytest.approx(4 / 3), "random tokens are no text"
    assert found["tau"] == pytest.approx(2) and found["error"] == pytest.approx(1.25)


def test_a_table_holds_ours_against_vllms_ngram_and_the_best_fixed_tree():
    speeds = {"plain": 1.0, "ngram": 1.2, "ngram-4": 1.1, "ngram-12": 1.5, "vllm-ngram": 0.8}
    cell = {name: [record("a", LATER, 1 / speed, 1.0)] for name, speed in speeds.items()}
    found = {name: figures(records) for name, records in cell.items()}
    assert over(found, "ngram", ["ngram-4", "ngram-12", "ngram-24"]) == pytest.approx(0.8)
    lines = table({"batch 1, T = 0": cell}).splitlines()
    assert lines[3].startswith("| batch 1, T = 0 | ngram | – (–) | 1.20 (1.20) | – | 1.20 | 1.20 a")
    assert "| 1.50 | 0.80 |" in lines[3] and "| 1.25 | – |" in lines[2]


def test_every_engine_is_one_that_vllm_can_be_asked_for():
    drafters = {"specblock": DRAFTER, "eagle3": DRAFTER}
    names = default_methods(DRAFTER, DRAFTER, fixed=True)
    assert {*names} == {*ENGINES, "plain", "plain-v2"}
    assert {*default_methods(None, None, fixed=False)} == {
        *("plain", "plain-v2", "ngram", "vllm-ngram", "vllm-suffix")
    }
    found = resolve(
        BenchConfig(
            target=TARGET, set=("-",), method=tuple(names), drafter=drafters, define=ENGINES
        )
    )
    assert found["ngram"].speculative == {"method": "specblock", "kind": "ngram"}
    fixed = found["merged-24"].speculative
    assert fixed["num_speculative_tokens"] == 24 and fixed["draft_policy"] == "merge"
    assert fixed["enable_adaptive_verification"] is False
    assert found["vllm-ngram"].speculative["method"] == "ngram"


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    beside = []

    @contextmanager
    def noting(number):
        beside.append(number)
        yield

    command = (sys.executable, fake_engine.__file__)
    made = Engines({}, tmp_path, noting, {}, command)
    made.said = beside
    yield made
    made.end()


def methods(**how):
    env = {"VLLM_USE_V2_MODEL_RUNNER": None}
    return [Method(name, given, {}, env) for name, given in how.items()]


def test_engines_take_turns_and_one_that_fails_is_left_out(engines, tmp_path):
    group = methods(
        plain=None,
        fast={"method": "x", "seconds": 0.5},
        refusing={"method": "x", "refuses": "There is no such package"},
        dying={"method": "x", "dies_at": 2},
    )
    turns = [*turns_of({"a": [[1], [2], [3]]}, 1, 3, 10, 20)]
    found = engines.measure("cell", group, turns, 0.0, 10)
    assert [*found] == ["plain", "fast"] and engines.said == [0] * 3 + [1] * 3 + [2] * 2
    assert [r["phase"] for r in found["fast"]] == [FIRST, FIRST, LATER]
    assert figures_of_time(found["fast"]) == [(15.0, 30.0)] * 3
    assert "There is no such package" in engines.failed["refusing"]
    assert "out of luck" in engines.failed["dying"]
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [job["max_tokens"] for job in journal[:3]] == [never_slower.WARM_UP] * 3


def figures_of_time(records):
    return [(each["cpu"], each["plain_cpu"]) for each in records]


def test_a_neighbour_has_the_same_bursts_beside_every_engine():
    first = [*islice(bursts(1), 400)]
    assert first == [*islice(bursts(1), 400)] != [*islice(bursts(2), 400)]
    pauses, busy = zip(*first)
    assert sum(pauses) / 400 == pytest.approx(PAUSE, rel=0.2)
    assert sum(busy) / 400 == pytest.approx(BURST, rel=0.2)
