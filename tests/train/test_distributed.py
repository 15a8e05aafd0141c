"""Two processes learn what one does: replicated and sharded, and across each other's states."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_specblock.train.config import TrainConfig, parse
from vllm_specblock.train.run import build

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
def train_state(tmp_path):
    """What the run called `name` has saved of its drafter."""

    def train_state(name: str):
        path = tmp_path / name / "training" / "state.pt"
        return torch.load(path, weights_only=True)["learners"]["drafter"]

    return train_state


def run(command: list[str]) -> None:
    """Run to a good end; of a run that hangs, say where every thread stands."""
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        _, stderr = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        signal_all(next(word for word in command if word.startswith("--out=")), signal.SIGABRT)
        _, stderr = process.communicate(timeout=60)
        pytest.fail(f"a run hung:\n{stderr[-6000:]}")
    assert process.returncode == 0, stderr[-3000:]


def signal_all(word: str, number: int) -> None:
    """Send a signal to every process with `word` in its command line.

    torchrun's workers have their own sessions, and outlive it.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (entry / "cmdline").read_text():
                os.kill(int(entry.name), number)


def kill_after_a_save(command: list[str], state: Path) -> None:
    """kill -9 of all processes of a run that has saved at least once and is not done."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    while not state.exists() and process.poll() is None and time.monotonic() < began + 120:
        time.sleep(0.01)
    signal_all(f"--out={state.parents[1]}", signal.SIGKILL)
    process.wait()
    assert torch.load(state, weights_only=True)["step"] < OPTIONS["steps"]


def test_two_processes_end_where_one_does(command, train_state, tmp_path):
    run(command("one", steps=4))
    one = train_state("one")
    for parallel in ("replicate", "shard"):
        # Each counts other rows under the valid-prefix mask, and so does each of its micro-batches.
        run(command(parallel, 2, steps=4, parallel=parallel, micro_batch=1))
        two = train_state(parallel)
        close(one, two)
        mine, other = (json.loads(state["log"]["entries"]) for state in (one, two))
        assert [entry["step"] for entry in mine] == [entry["step"] for entry in other]
        assert [entry["step"] for entry in mine] == [2, 2, 4, 4]
        for entry, its in zip(mine[::2], other[::2]):
            assert entry["loss"][0] == pytest.approx(its["loss"][0], rel=1e-3)
        assert [entry.get("tau") for entry in mine] == [entry.get("tau") for entry in other]
        for kept in (tmp_path / parallel, tmp_path / parallel / "best"):
            assert (kept / "model.safetensors").exists() and (kept / "provenance.json").exists()


def test_a_killed_sharded_run_goes_on_in_one_process(command, train_state, folder, tmp_path):
    """From exactly what two ranks saved, shards put together. (Where it ends is another run's
    end but for rounding, which many updates make large: a choice that flips ends a path.)"""
    path = tmp_path / "sharded" / "training" / "state.pt"
    kill_after_a_save(command("sharded", 2, parallel="shard"), path)
    saved = train_state("sharded")
    options = {**OPTIONS, "target": folder / "target", "data": folder / "d.safetensors"}
    trainer = build(parse(TrainConfig, **options, out=tmp_path / "sharded"), torch.device("cpu"))
    trainer.restore()
    state = trainer.train_state.state()
    assert all(torch.equal(saved["model"][name], value) for name, value in state["model"].items())
    (moments,), (found,) = ([each["state"] for each in of["optimizers"]] for of in (saved, state))
    assert len(moments) > 20 and moments.keys() == found.keys()
    for number, of in found.items():
        assert all(torch.equal(moments[number][name], value) for name, value in of.items())
    step = trainer.step
    trainer.update()
    assert trainer.step == step + 1


def close(state, other):
    assert state["model"].keys() == other["model"].keys()
    for name, value in state["model"].items():
        torch.testing.assert_close(other["model"][name], value, atol=2e-5, rtol=1e-3, msg=name)
