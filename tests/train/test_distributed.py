"""Two processes learn what one does: replicated and sharded, and across each other's states."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from vllm_specblock.train.config import TrainConfig, parse
from vllm_specblock.train.run import build

OPTIONS = {
    "draft_vocab_size": 20,
    "steps": 4,
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
def pair(folder) -> dict:
    return {"target": folder / "target", "data": folder / "d.safetensors"}


@pytest.fixture
def command(pair, tmp_path):
    """`specblock train` in so many processes, as a command line; OUT is tmp_path/name."""

    def command(name: str, ranks: int = 1, **changes) -> list[str]:
        options = {**OPTIONS, **pair, "out": tmp_path / name, **changes}
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_end_where_one_does(command, train_state, pair, tmp_path):
    run(command("one"))
    one = train_state("one")
    for parallel in ("replicate", "shard"):
        # Each counts other rows under the valid-prefix mask, and so does each of its micro-batches.
        run(command(parallel, 2, parallel=parallel, micro_batch=1))
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
    goes_on({**OPTIONS, **pair, "out": tmp_path / "shard"}, two)


def goes_on(options: dict, saved: dict) -> None:
    """One process resumes from exactly what two ranks saved, shards put together."""
    trainer = build(parse(TrainConfig, **options), torch.device("cpu"))
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
