"""Commands that take a GPU where one is: answers, features, training, evaluation, serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lib.server import Server
from openai import OpenAI
from support.engines import DRAFTER, TARGET, make_engine
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner
from vllm import SamplingParams

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
    for name, more in (("first", {"device": "auto"}), ("drafter", {"features": str(stored)})):
        path = tmp_path / f"{name}.json"  # YAML as well
        path.write_text(json.dumps(config | more | {"out": str(tmp_path / name)}))
        specblock("train", path)
    figures = tmp_path / "figures.json"
    options = "--prompts", 1, "--new-tokens", 16, "--nodes", 8, "--device", "cuda", "--raw"
    specblock("eval", out, "--target", TARGET, "--data", prompts, *options, "--json", figures)
    found = json.loads(figures.read_text())
    assert "H100" in found["device"] and found["results"]


def test_serve(tmp_path):
    """An answer through HTTP is plain vLLM's, and has accepted drafts in it."""
    path, model, prompt = tmp_path / "serve.yaml", str(TARGET), PROMPTS[1]
    options = ENGINE | {"dtype": "float32", "max_model_len": 256, "gpu_memory_utilization": 0.02}
    asked = {"method": "specblock", "model": str(DRAFTER)}
    path.write_text(json.dumps(options | {"model": model, "speculative_config": asked}))
    server = Server(["--config", str(path)], tmp_path / "log", {}, tmp_path)
    try:
        server.wait()
        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        given = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
        text = client.completions.create(**given).choices[0].text
        accepted = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    finally:
        server.close()
    plain = make_engine(None, **options)
    ids = plain.llm.get_tokenizer().encode(prompt)
    ((wanted,),) = plain.generate([ids], SamplingParams(temperature=0, max_tokens=32))
    assert text == wanted.text and accepted > 0
