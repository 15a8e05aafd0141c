"""The end-to-end benchmark: its profile, its window, its table; one real engine at the end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import end_to_end
import pytest
import steady_state
import typer
from end_to_end import PLAIN, Place
from lib import acceptance
from steady_state import DEVICE, DRAFTING, STEPS, TOKENS
from typer.testing import CliRunner

from vllm_specblock.bench.process import EngineFailed
from vllm_specblock.engine.metrics import acceptance as counted

TAU = 4.41


def cli(*arguments):
    app = typer.Typer()
    app.command()(end_to_end.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-8b"])
@pytest.mark.parametrize("tau", [2.5, TAU])
def test_the_profile_has_the_tau_that_was_asked_for(model, tau):
    best = acceptance.profile(model, tau)
    assert acceptance.tree_tau(best, acceptance.PAPER_TREE) == pytest.approx(tau, abs=1e-3)
    assert len(best) == 8 and best == sorted(best, reverse=True)


def test_no_profile_has_a_tau_of_ten():
    with pytest.raises(SystemExit, match="--tau is 10"):
        acceptance.profile("llama-8b", 10.0)


def test_chains_and_rates():
    assert acceptance.chain_tau([0.5, 0.5, 0.5], 2) == pytest.approx(1.75)
    assert acceptance.imposed([0.5, 0.5], 4) == {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.5, 0.25, 0.0, 0.0],
    }
    assert acceptance.imposed([0.5, 0.5], 1)["synthetic_acceptance_rates"] == [0.5]


def place(best):
    return Place(Path("t"), Path("d"), Path("e"), best, {})


def test_every_engine_that_drafts_is_imposed_upon_and_plain_vllm_is_not():
    found = end_to_end.engines(place([0.8, 0.7]), [12, 60], [3], gpu=True)
    assert list(found) == [
        PLAIN,
        "n-gram @ 3",
        "EAGLE-3 chain @ 3",
        "SpecBlock @ 12",
        "SpecBlock @ 60",
        "SpecBlock, 8 bits @ 60",
        "SpecBlock, adaptive @ 60",
    ]
    assert found.pop(PLAIN) is None
    for keys in found.values():
        assert len(keys["synthetic_acceptance_rates"]) == keys["num_speculative_tokens"]


def test_without_a_gpu_our_n_gram_head_looks_up_and_is_accepted_as_it_is():
    where = place([0.8, 0.7])
    found = end_to_end.engines(where, [12], [3], gpu=False)
    assert "n-gram @ 3" not in found
    assert found["n-gram, ours @ 3"]["method"] == "specblock"
    assert end_to_end.expected_tau(where, found["n-gram, ours @ 3"]) is None


def test_a_tree_is_promised_more_than_a_chain_of_its_depth():
    where = place(acceptance.profile("llama-8b", TAU))
    found = end_to_end.engines(where, [60], [8], gpu=True)
    tree, chain = (
        end_to_end.expected_tau(where, found[name])
        for name in ("SpecBlock @ 60", "EAGLE-3 chain @ 8")
    )
    assert tree == pytest.approx(TAU, abs=1e-3) and 2 < chain < tree


class FakeEngine:
    """Two requests; request 0 gets `rates[0]` tokens a step, request 1 comes `late` steps late."""

    def __init__(self, rates, late, length):
        self.rates, self.late, self.length = rates, late, length
        self.left, self.count = {}, 0

    def add_request(self, name, prompt, params):
        self.left[name] = self.length

    def has_unfinished_requests(self):
        return any(self.left.values())

    def step(self):
        self.count += 1
        answers = []
        for index, (name, left) in enumerate(self.left.items()):
            if left and (index == 0 or self.count > self.late):
                given = min(left, self.rates[index])
                self.left[name] = left - given
                outputs = [SimpleNamespace(token_ids=[5] * given)]
                answers.append(
                    SimpleNamespace(request_id=name, outputs=outputs, finished=left == given)
                )
        return answers


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setattr(steady_state, "params_of", lambda job: [None] * len(job["prompts"]))


def window(rates, late, length):
    engine = FakeEngine(rates, late, length)
    llm = SimpleNamespace(
        llm_engine=engine,
        get_metrics=lambda: [SimpleNamespace(name=counted.TOKENS, value=engine.count, labels={})],
    )
    return steady_state.window(llm, {"prompts": ["a", "b"], "max_tokens": length}, "w", None)


def test_a_window_is_from_the_last_warm_request_to_the_first_that_ends(no_vllm):
    # Request 1 comes in step 5 and is warm with step 7; request 0 ends in step 20.
    seconds, found = window((3, 2), 4, 60)
    assert found == Counter({STEPS: 13, TOKENS: 13 * 5, counted.TOKENS: 13}) and seconds > 0


def test_a_request_that_ends_too_early_is_an_error(no_vllm):
    with pytest.raises(RuntimeError, match="ended before all had 3 outputs"):
        window((10, 2), 9, 60)


def result(speed, batch=1, step=10.0, drafting=0.0, memory=0, tau=1.0, imposed=None, each=1.0):
    return {
        "tokens_per_second": speed,
        "step_ms": step,
        "drafting_ms": drafting,
        "tau": tau,
        "tau_imposed": imposed,
        "tokens_per_step": each,
        "device_bytes": memory,
        "steps": 9,
        "batch": batch,
    }


RESULTS = {
    "vLLM, batch 1": result(100, memory=10_000_000_000),
    "SpecBlock @ 12, batch 1": result(250, tau=3.3, imposed=3.4),
    "SpecBlock @ 60, batch 1": result(
        360, step=12.0, drafting=1.5, memory=11_700_000_000, tau=4.4, imposed=4.41, each=4.3
    ),
    "vLLM, batch 8": result(800, batch=8),
    "SpecBlock @ 12, batch 8": result(760, batch=8),
    "SpecBlock @ 60, batch 8": result(700, batch=8),
}


def test_the_table():
    lines = end_to_end.table(RESULTS).splitlines()
    assert lines[4] == (
        "| 1 | SpecBlock @ 60 | 360 | 3.60 | 4.40 (4.41 imposed) | 4.30 | 12.00 |"
        " 12% | 1.05 | 1.70 |"
    )


def fake_run(calls, failing=()):
    def run(name, arguments, job, log):
        calls.append((arguments, job))
        if any(part in json.dumps(arguments["speculative_config"]) for part in failing):
            raise EngineFailed("The engine ended with code 1: no memory")
        counters = {
            TOKENS: 400,
            STEPS: 100,
            DRAFTING: 50_000_000,
            DEVICE: 0,
            counted.STEPS: 100,
            counted.TOKENS: 400,
        }
        return {"seconds": 2.0, "counters": counters}

    return run


def test_a_failed_engine_is_named_and_a_second_run_goes_on(tmp_path, monkeypatch):
    out = f"--model tiny --out {tmp_path}/e.json --batches 1,2 --nodes 12 --chains 3".split()
    out += ["--context", "40", "--tokens", "32"]
    calls = []
    monkeypatch.setattr(end_to_end, "run", fake_run(calls, failing=["eagle3"]))
    first = cli(*out)
    assert first.exit_code == 1 and "no memory" in first.output and len(calls) == 12
    arguments, job = calls[6]
    assert arguments["load_format"] == "dummy" and arguments["max_num_seqs"] == 2
    assert len(job["prompts"]) == 2
    monkeypatch.setattr(end_to_end, "run", fake_run(calls))
    second = cli(*out)
    assert second.exit_code == 0, second.output
    assert len(calls) == 14
    results = json.loads((tmp_path / "e.json").read_text())["results"]
    assert results["SpecBlock @ 12, batch 2"]["tokens_per_second"] == 200
    assert results["SpecBlock @ 12, batch 1"]["step_ms"] == pytest.approx(20)
    assert results["SpecBlock @ 12, batch 1"]["drafting_ms"] == pytest.approx(0.5)


def test_arguments_of_all_engines_are_a_setting(tmp_path, monkeypatch):
    out = ["--model", "tiny", "--out", str(tmp_path / "e.json"), "--batches", "1", "--tokens", "32"]
    calls = []
    monkeypatch.setattr(end_to_end, "run", fake_run(calls))
    assert cli(*out, "--engine", '{"max_num_seqs": 7}').exit_code == 0
    assert {arguments["max_num_seqs"] for arguments, _ in calls} == {7}
    assert json.loads((tmp_path / "e.json").read_text())["settings"]["engine"] == {
        "max_num_seqs": 7
    }
    assert "other engine" in str(cli(*out).exception or cli(*out).output)


@pytest.mark.engine
def test_one_real_engine_of_random_weights(tmp_path, monkeypatch):
    """Dummy weights, imposed acceptance, a steady window: τ is near what was imposed."""
    pytest.importorskip("vllm", reason="runs real vLLM")
    instead, really = fake_run([]), end_to_end.run  # a start takes most of the time
    monkeypatch.setattr(
        end_to_end,
        "run",
        lambda name, arguments, *job: (really if arguments["speculative_config"] else instead)(
            name, arguments, *job
        ),
    )
    path = tmp_path / "e.json"
    given = f"--model tiny --nodes 12 --batches 2 --context 40 --tokens 200 --repeat 1 --out {path}"
    found = cli(*given.split(), "--only", "SpecBlock @ 12")
    assert found.exit_code == 0, found.output
    results = json.loads(path.read_text())["results"]
    ours = results["SpecBlock @ 12, batch 2"]
    # About 110 draws of a standard deviation of 1.8: four of their mean's.
    assert ours["tau"] == pytest.approx(ours["tau_imposed"], abs=0.7)
    assert ours["tokens_per_step"] == pytest.approx(ours["tau"], rel=0.1)
    assert 0 < ours["drafting_ms"] < ours["step_ms"]
