"""Benchmarks of engines: what is asked of vLLM, profiles, tables; one real engine at the end."""

from __future__ import annotations

import json
from pathlib import Path

import end_to_end
import pytest
from end_to_end import PLAIN, Place
from lib import acceptance
from never_slower import ENGINES, default_methods
from steady_state import DEVICE, DRAFTING, STEPS, TOKENS
from support.engines import DRAFTER, TARGET
from support.scripts import command

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.methods import resolve
from vllm_specblock.bench.process import EngineFailed
from vllm_specblock.engine.metrics import acceptance as counted


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


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-8b"])
@pytest.mark.parametrize("tau", [2.5, 4.41])
def test_the_profile_has_the_tau_that_was_asked_for(model, tau):
    best = acceptance.profile(model, tau)
    assert acceptance.tree_tau(best, acceptance.PAPER_TREE) == pytest.approx(tau, abs=1e-3)
    assert len(best) == 8 and best == sorted(best, reverse=True)


def test_every_engine_that_drafts_is_imposed_upon_and_plain_vllm_is_not():
    place = Place(Path("t"), Path("d"), Path("e"), [0.8, 0.7], {})
    found = end_to_end.engines(place, [12, 60], [3], gpu=True)
    ours = [f"SpecBlock{kind}" for kind in (" @ 12", " @ 60", ", 8 bits @ 60", ", adaptive @ 60")]
    assert list(found) == [PLAIN, "n-gram @ 3", "EAGLE-3 chain @ 3", *ours]
    assert found.pop(PLAIN) is None
    for keys in found.values():
        assert len(keys["synthetic_acceptance_rates"]) == keys["num_speculative_tokens"]


def fake_run(calls, failing=()):
    """failing: batch sizes of which an engine fails."""

    def run(asked, job, passes, logs):
        calls.append((asked, job))
        if len(job["prompts"]) in failing:
            raise EngineFailed("The engine ended with code 1: no memory")
        counters = {TOKENS: 400, STEPS: 100, DRAFTING: 50_000_000, DEVICE: 0}
        counters |= {counted.STEPS: 100, counted.TOKENS: 400}
        answers = [{"seconds": 2.0 + n, "cpu": 4.0, "counters": counters} for n in range(passes)]
        return {name: answers for name in asked}

    return run


def test_a_failed_engine_is_named_and_a_second_run_goes_on(tmp_path, monkeypatch):
    out = f"--model tiny --out {tmp_path}/e.json --batches 1,2 --nodes 12 --chains 3".split()
    out += ["--context", "40", "--tokens", "32"]
    calls = []
    monkeypatch.setattr(end_to_end, "run", fake_run(calls, failing=[1]))
    first = command(end_to_end.main, *out)
    assert first.exit_code == 1 and "no memory" in first.output and len(calls) == 2
    asked, job = calls[1]
    assert f"{PLAIN}, batch 2" in asked and len(asked) == 6, "they take turns on a CPU"
    arguments = asked["SpecBlock @ 12, batch 2"]
    assert arguments["load_format"] == "dummy" and arguments["max_num_seqs"] == 2
    assert len(job["prompts"]) == 2
    monkeypatch.setattr(end_to_end, "run", fake_run(calls))
    second = command(end_to_end.main, *out)
    assert second.exit_code == 0, second.output
    assert len(calls) == 3 and len(calls[2][1]["prompts"]) == 1
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    ours = results["SpecBlock @ 12, batch 2"]
    assert ours["tokens_per_second"] == 200 and ours["step_ms"] == pytest.approx(20)
    assert ours["drafting_ms"] == pytest.approx(0.5) and ours["cpu"] == [0.01] * 3
    results["vLLM, batch 2"]["cpu"] = [0.015, 0.02, 0.03]
    assert "1.00 (2.00)" in end_to_end.table(results)


@pytest.mark.engine
def test_one_real_engine_of_random_weights(tmp_path, monkeypatch):
    """Dummy weights, imposed acceptance, a steady window: τ is near what was imposed."""
    pytest.importorskip("vllm", reason="runs real vLLM")
    instead, really = fake_run([]), end_to_end.run  # a start takes most of the time
    monkeypatch.setattr(
        end_to_end,
        "run",
        lambda asked, *job: {
            name: (really if given["speculative_config"] else instead)({name: given}, *job)[name]
            for name, given in asked.items()
        },
    )
    path = tmp_path / "e.json"
    given = f"--model tiny --nodes 12 --batches 2 --context 40 --tokens 200 --repeat 1 --out {path}"
    found = command(end_to_end.main, *given.split(), "--only", "SpecBlock @ 12")
    assert found.exit_code == 0, found.output
    results = json.loads(path.read_text())["results"]
    ours = results["SpecBlock @ 12, batch 2"]
    # About 110 draws of a standard deviation of 1.8: four of their mean's.
    assert ours["tau"] == pytest.approx(ours["tau_imposed"], abs=0.7)
    assert ours["tokens_per_step"] == pytest.approx(ours["tau"], rel=0.1)
    assert 0 < ours["drafting_ms"] < ours["step_ms"]
