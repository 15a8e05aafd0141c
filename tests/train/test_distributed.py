"""Two processes learn what one does: replicated and sharded, and across each other's states."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from support.training import equal

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


def trained(options: dict, ranks: int = 1) -> dict:
    """What `specblock train` in so many processes has saved of its drafter."""
    words = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    python = [sys.executable, *(launch if ranks > 1 else [])]
    command = [*python, "-m", "vllm_specblock", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    state = torch.load(options["out"] / "training" / "state.pt", weights_only=True)
    return state["learners"]["drafter"]


def test_two_processes_end_where_one_does(folder, tmp_path):
    options = {**OPTIONS, "target": folder / "target", "data": folder / "d.safetensors"}
    one = trained(options | {"out": tmp_path / "one"})
    for parallel in ("replicate", "shard"):
        # Each counts other rows under the valid-prefix mask, and so does each of its micro-batches.
        out = tmp_path / parallel
        two = trained(options | {"out": out, "parallel": parallel, "micro_batch": 1}, ranks=2)
        assert one["model"].keys() == two["model"].keys()
        for name, value in one["model"].items():
            torch.testing.assert_close(two["model"][name], value, atol=2e-5, rtol=1e-3, msg=name)
        mine, other = (json.loads(state["log"]["entries"]) for state in (one, two))
        assert [entry["step"] for entry in mine] == [entry["step"] for entry in other]
        assert [entry["step"] for entry in mine] == [2, 2, 4, 4]
        for entry, its in zip(mine[::2], other[::2]):
            assert entry["loss"][0] == pytest.approx(its["loss"][0], rel=1e-3)
        assert [entry.get("tau") for entry in mine] == [entry.get("tau") for entry in other]
        for kept in (out, out / "best"):
            assert (kept / "model.safetensors").exists() and (kept / "provenance.json").exists()
    goes_on(options | {"out": out}, two)


def goes_on(options: dict, saved: dict) -> None:
    """One process resumes from exactly what two ranks saved, shards put together."""
    trainer = build(parse(TrainConfig, **options), torch.device("cpu"))
    trainer.restore()
    state = trainer.train_state.state()
    assert equal(saved["model"], state["model"])
    (moments,), (found,) = ([each["state"] for each in of["optimizers"]] for of in (saved, state))
    assert len(moments) > 20 and moments.keys() == found.keys()
    assert all(equal(moments[number], of) for number, of in found.items())
    step = trainer.step
    trainer.update()
    assert trainer.step == step + 1
