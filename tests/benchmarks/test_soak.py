"""What a soak says of its findings."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")

import soak
from lib.soak_phases import MODEL, PHASES
from lib.soak_run import Findings


def test_exit_status_says_what_was_found(tmp_path, monkeypatch, capsys):
    happened = {"preemptions": 4, "prompt_tokens": 100, "prefix_hit_tokens": 25}
    found = Findings(
        requests=1_200,
        windows=1,
        cut=200,
        memory={"drafts": [{"server": 700.0, "engine": 1700.0}]},
        counters={"drafts": happened | {"accepted_nodes": 5}},
        failures=["a request stayed."],
    )

    def run_phase(phase, nodes, seed, clients, window, enough, folder, seen):
        assert not enough(found, 59.0) and enough(found, 61.0)
        seen(found)
        return found

    monkeypatch.setattr(soak, "run_phase", run_phase)
    options = {"minutes": 1, "requests": 1_000, "clients": 2, "window": 9, "nodes": 4, "seed": 0}
    with pytest.raises(SystemExit) as ended:
        soak.main(phase=["LoRA"], out=tmp_path / "one", **options)
    assert ended.value.code == 1 and "LoRA: a request stayed." in capsys.readouterr().out
    assert json.loads((tmp_path / "one/soak.json").read_text())["results"]["LoRA"]["wrong"]
    found.failures.clear()
    with pytest.raises(SystemExit) as ended:
        soak.main(phase=["LoRA"], out=tmp_path / "two", **options)
    assert ended.value.code == 0


@pytest.mark.parametrize("name", PHASES)
def test_both_servers_have_the_same_flags(name, tmp_path):
    phase = PHASES[name]
    plain, ours = phase.arguments(tmp_path, None), phase.arguments(tmp_path, 16)
    assert plain[0] == ours[0] == MODEL
    *same, option, drafts = ours
    assert option == "--speculative-config"
    assert json.loads(drafts)["num_speculative_tokens"] == 16
    # Of slots for adapters plain vLLM has one more.
    assert [pair for pair in zip(plain, same, strict=True) if pair[0] != pair[1]] == (
        [("3", "2")] if phase.adapters else []
    )
