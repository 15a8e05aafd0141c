"""Commands that take a GPU where one is: answers, features, training, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engines import TARGET
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.train import attention

PROMPTS = ["import os\n\n", "class Reader:\n", "def add(a, b):\n", "for line in lines:\n"]
ENGINE = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "max_num_batched_tokens": 80,
    "max_num_seqs": 4,
    "kernel_config": {"enable_flashinfer_autotune": False, "enable_jit_warmup": False},
}
LENGTH = 32


def specblock(*words: str | int | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(scope="module")
def data(prompts) -> Path:
    out = prompts.with_name("data")
    given = "--target", TARGET, "--input", prompts, "--raw", "--max-length", LENGTH
    more = "--max-new-tokens", 16, "--dtype", "float32", "--draft-vocab-size", 256
    specblock("data", *given, *more, "--engine", json.dumps(ENGINE), "--out", out)
    return out


def test_doctor():
    assert "Triton compiles them for sm_90" in specblock("doctor")


def test_training(prompts, data, tmp_path, monkeypatch):
    """On features of a forward per batch, then on stored ones; the drafter is evaluated."""
    # The emulated GPU does not run Inductor's kernels.
    monkeypatch.setattr(attention, "flex", lambda: flex_attention)
    where = "--target", TARGET, "--data", data, "--length", LENGTH, "--dtype", "float32"
    stored, out = tmp_path / "features", tmp_path / "drafter"
    specblock("features", *where, "--out", stored, "--engine", json.dumps(ENGINE))
    config = {
        "target": str(TARGET), "data": str(data), "draft_vocab_size": 256, "length": LENGTH,
        "batch": 2, "steps": 2, "rank_from": 1, "hold_out": 1, "eval_every": 1, "device": "cuda",
        "precision": "fp32",
    }  # fmt: skip
    for name, more in (("first", {}), ("drafter", {"features": str(stored)})):
        path = tmp_path / f"{name}.json"  # YAML as well
        path.write_text(json.dumps(config | more | {"out": str(tmp_path / name)}))
        specblock("train", path)
    figures = tmp_path / "figures.json"
    options = "--prompts", 1, "--new-tokens", 16, "--nodes", 8, "--device", "cuda", "--raw"
    specblock("eval", out, "--target", TARGET, "--data", prompts, *options, "--json", figures)
    found = json.loads(figures.read_text())
    assert "H100" in found["device"] and found["results"]
