"""Two processes learn what one does: replicated and sharded, and across each other's states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

OPTIONS = {
    "draft_vocab_size": 20,
    "steps": 60,
    "batch": 4,
    "length": 24,
    "lr": 1e-3,
    "rank_from": 2,
    "save_every": 2,
    "log_every": 2,
    "precision": "fp32",
    "device": "cpu",
    "hold_out": 2,
    "eval_every": 2,
}


@pytest.fixture
def command(folder, tmp_path):
    """`specblock train` in so many processes, as a command line; OUT is tmp_path/name."""

    def command(name: str, ranks: int = 1, **changes) -> list[str]:
        options = OPTIONS | {
            "target": folder / "target",
            "data": folder / "d.safetensors",
            "out": tmp_path / name,
            **changes,
        }
        words = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        python = [sys.executable, *(launch if ranks > 1 else [])]
        return [*python, "-m", "vllm_specblock", "train", *words]

    return command


@pytest.fixture
def student(tmp_path):
    """What the run called `name` has saved of its drafter."""

    def student(name: str):
        path = tmp_path / name / "training" / "state.pt"
        return torch.load(path, weights_only=True)["students"]["drafter"]

    return student


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]


def kill_after_a_save(command: list[str], state: Path) -> None:
    """kill -9 of all processes of a run that has saved at least once and is not done."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    while not state.exists() and process.poll() is None and time.monotonic() < began + 120:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert torch.load(state, weights_only=True)["step"] < OPTIONS["steps"]


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_two_processes_end_where_one_does(command, student, tmp_path, parallel):
    run(command("one", steps=4))
    run(command("two", 2, steps=4, parallel=parallel))
    close(student("one"), student("two"))
    one, two = (json.loads(student(name)["journal"]["entries"]) for name in ("one", "two"))
    assert [entry["step"] for entry in one] == [entry["step"] for entry in two] == [2, 2, 4, 4]
    for mine, other in zip(one[::2], two[::2]):
        assert mine["loss"][0] == pytest.approx(other["loss"][0], rel=1e-3)
    assert [entry.get("tau") for entry in one] == [entry.get("tau") for entry in two]
    for kept in (tmp_path / "two", tmp_path / "two" / "best"):
        assert (kept / "model.safetensors").exists() and (kept / "provenance.json").exists()


def test_killed_runs_end_where_an_unbroken_one_does(command, student, tmp_path):
    """kill -9 in one process goes on to the same bits; a sharded run goes on in one process."""
    run(command("whole"))
    for name, ranks, mode in (("alone", 1, "replicate"), ("sharded", 2, "shard")):
        state = tmp_path / name / "training" / "state.pt"
        kill_after_a_save(command(name, ranks, parallel=mode), state)
        run(command(name))
    whole, alone = student("whole")["model"], student("alone")["model"]
    assert all(torch.equal(whole[name], alone[name]) for name in whole)
    close(student("whole"), student("sharded"))


def test_a_batch_that_ranks_cannot_share_is_one_sentence(command):
    call = command("uneven", 2, batch=3)
    result = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "A batch of 3 windows cannot be shared by 2 devices" in result.stderr


def close(state, other):
    assert state["model"].keys() == other["model"].keys()
    for name, value in state["model"].items():
        torch.testing.assert_close(other["model"][name], value, atol=2e-5, rtol=1e-3, msg=name)
