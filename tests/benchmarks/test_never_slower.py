"""Served figures: which engines and questions there are, and what the first steps are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import never_slower
import psutil
from lib.engines import ENGINES
from never_slower import default_methods
from support import fake_engine
from support.engines import DRAFTER, TARGET

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.methods import resolve


def test_every_engine_is_one_that_vllm_can_be_asked_for():
    names = default_methods(DRAFTER, DRAFTER, fixed=True)
    assert {*names} == {*ENGINES, "plain", "plain-v2"}
    assert {*default_methods(None, None, fixed=False)} == {
        *("plain", "plain-v2", "ngram", "vllm-ngram", "vllm-suffix")
    }
    config = BenchConfig(
        **{"target": TARGET, "set": ("-",), "method": names, "define": ENGINES},
        drafter={"specblock": DRAFTER, "eagle3": DRAFTER},
    )
    found = resolve(config)
    assert found["ngram"].speculative == {"method": "specblock", "kind": "ngram"}
    fixed = found["merged-24"].speculative
    assert fixed["num_speculative_tokens"] == 24 and fixed["draft_policy"] == "merge"
    assert fixed["enable_adaptive_verification"] is False
    assert found["vllm-ngram"].speculative["method"] == "ngram"


def test_passes_are_first_until_plain_has_taken_its_steps(tmp_path, monkeypatch, capsys):
    """Stand-ins: each answer of 10 tokens to two sets takes 20 of 30 first steps, so two passes."""
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    prepare = never_slower.prepare

    def fake(config):
        bench = prepare(config)
        bench.command = sys.executable, fake_engine.__file__
        return bench

    monkeypatch.setattr(never_slower, "prepare", fake)
    monkeypatch.setitem(
        ENGINES,
        "ngram",
        ENGINES["ngram"].model_copy(
            update={"speculative": {"seconds": 0.5, "method": "specblock"}}
        ),
    )
    questions = tmp_path / "set.jsonl"
    questions.write_text('{"id": "a", "turns": ["one"]}\n{"id": "b", "turns": ["two"]}\n')
    options = dict(batches="2", temperature=[0.0], tokens=10, passes=3, first_steps=30)
    never_slower.main(
        TARGET, [str(questions)], method=["plain", "ngram"], out=tmp_path / "out", **options
    )
    row = json.loads((tmp_path / "out/never_slower.json").read_text())["batch 2, T = 0"]["ngram"]
    assert (row["first_cpu"], row["later_cpu"]) == (2.0, 2.0)
    journal = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [job["max_tokens"] for job in journal] == [8] * 2 + [10] * 12
    assert all(len(job["prompts"]) == 2 and job["ignore_eos"] for job in journal)
    assert "| batch 2, T = 0 | ngram | 2.00 (2.00) | 2.00 (2.00) |" in capsys.readouterr().out
    units = (tmp_path / "out/batch_2_T_0/units.jsonl").read_text().splitlines()
    assert [json.loads(line)["set"] for line in units] == ["random", "set"] * 3


def test_a_neighbour_ends_with_its_benchmark():
    """Also with one that was killed."""
    code = (
        "import time, neighbour\nwith neighbour.neighbour():\n    print(flush=True); time.sleep(99)"
    )
    folder = Path(never_slower.__file__).parent / "lib"
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE)
    killed.stdout.readline()
    busy = psutil.Process(killed.pid).children()
    assert len(busy) == len(os.sched_getaffinity(0))
    killed.kill()
    killed.wait()
    assert not psutil.wait_procs(busy, timeout=30)[1]
