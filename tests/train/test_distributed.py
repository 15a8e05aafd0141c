"""Two processes learn what one does: replicated and sharded, and across each other's states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.processes import run_python
from support.training import equal

from vllm_specblock.train.config import TrainConfig
from vllm_specblock.train.run import build, train


def trained_by_two(config: TrainConfig) -> Path:
    """The folder that `specblock train` in two processes has left."""
    given = config.model_dump(mode="json", exclude_unset=True)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_python(*launch, "-m", "vllm_specblock", "train", *words)
    return config.out


def saved(out: Path) -> dict:
    """Of the drafter."""
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    return state["learners"]["drafter"]


def test_two_processes_end_where_one_does(options, tmp_path):
    shared = {"steps": 4, "save_every": 2, "hold_out": 2, "eval_every": 2}
    one = saved(train(options(**shared, out=tmp_path / "one"), progress=False))
    for parallel in ("replicate", "shard"):
        # Each counts other rows under the valid-prefix mask, and so does each of its micro-batches.
        out = tmp_path / parallel
        config = options(**shared, out=out, parallel=parallel, micro_batch=1)
        two = saved(trained_by_two(config))
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
    goes_on(options(**shared, out=out), two)


def goes_on(config: TrainConfig, saved: dict) -> None:
    """One process resumes from exactly what two ranks saved, shards put together."""
    trainer = build(config, torch.device("cpu"))
    trainer.restore()
    state = trainer.train_state.state()
    assert equal(saved["model"], state["model"])
    (moments,), (found,) = ([each["state"] for each in of["optimizers"]] for of in (saved, state))
    assert len(moments) > 20 and moments.keys() == found.keys()
    assert all(equal(moments[number], of) for number, of in found.items())
    step = trainer.step
    trainer.update()
    assert trainer.step == step + 1
