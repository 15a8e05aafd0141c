"""Extraction through vLLM gives the numbers that a forward of the target gives while training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.processes import run_python
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.train.data.packed_dataset import PackedDataset, load_texts
from vllm_specblock.train.target.features import OnlineTeacher, StoredTeacher, load_target

TARGET = Path(__file__).parents[2] / "examples/tiny_pair/target"
LENGTH, LAYERS = 48, (0, 3, 6)
SIZES = [100, 20, 1, 48, 9, 70, 25]


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "tokens.safetensors"
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 2048, (sum(SIZES),), generator=draw)
    safetensors.torch.save_file({"tokens": tokens, "lengths": torch.tensor(SIZES)}, path)
    return path


def arguments(data: Path, out: Path) -> list[str]:
    engine = {
        "max_num_batched_tokens": 20,  # fewer than a piece has: it comes in several steps
        "kv_cache_memory_bytes": 50 << 20,
        "enforce_eager": True,
    }
    given = f"--target={TARGET} --data={data} --out={out} --length={LENGTH} --dtype=float32"
    layers = ",".join(map(str, LAYERS))
    more = f"--layer-ids={layers}", "--shard-tokens=100", f"--engine={json.dumps(engine)}"
    return ["features", *given.split(), *more]


@pytest.mark.engine
def test_same_numbers_as_online(data, tmp_path):
    """Extracted by a vLLM engine in a process of its own, vLLM's default."""
    pytest.importorskip("vllm", reason="runs real vLLM")
    out, given = tmp_path / "out", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run_python("-m", "vllm_specblock", *arguments(data, out), VLLM_LOGGING_LEVEL="ERROR", **given)

    ids = torch.arange(5, 2048, 9)
    online = OnlineTeacher(load_target(TARGET, "fp32", torch.device("cpu")), LAYERS, ids)
    stored = StoredTeacher(out, TARGET, ids, "cpu", torch.float32, layer_ids=LAYERS, length=LENGTH)
    windows = PackedDataset(load_texts(data, 2048), LENGTH, shortest=3)
    batch = windows.of(range(len(windows)))
    inside = batch.tokens >= 0
    assert max(map(len, batch.segments)) > 1 and not inside.all()
    expected, found = online.teach(batch), stored.teach(batch)
    for name in ("hidden", "last", "target_probs"):
        here, there = getattr(found, name)[inside], getattr(expected, name)[inside]
        torch.testing.assert_close(here, there, atol=1e-4, rtol=0, msg=name)
    assert expected.last[inside].abs().max() > 1  # the tolerance means something
    tokens = batch.tokens[inside]
    assert torch.equal(stored.embed(tokens), online.embed(tokens))

    result = CliRunner().invoke(app, arguments(data, out))  # no engine starts
    assert result.exit_code == 0 and "whole already" in result.stdout
