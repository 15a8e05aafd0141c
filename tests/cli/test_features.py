"""Extraction through vLLM gives the numbers that a forward of the target gives while training."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.train.data.packed_dataset import PackedDataset, load_texts
from vllm_specblock.train.target.features import OnlineTeacher, StoredTeacher, load_target

TARGET = Path(__file__).parents[2] / "examples/tiny_pair/target"
LENGTH, LAYERS = 48, (0, 3, 6)
SIZES = [100, 20, 1, 48, 9, 70, 25]

runs_vllm = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="runs real vLLM"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.safetensors"
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 2048, (sum(SIZES),), generator=draw)
    safetensors.torch.save_file({"tokens": tokens, "lengths": torch.tensor(SIZES)}, path)
    return path


def arguments(data: Path, out: Path, changes: dict | None = None) -> list[str]:
    options = {
        "target": TARGET,
        "data": data,
        "out": out,
        "length": LENGTH,
        "layer-ids": ",".join(map(str, LAYERS)),
        "dtype": "float32",
        "shard-tokens": 100,
        "engine": json.dumps(
            {
                "max_num_batched_tokens": 20,  # fewer than a piece has: it comes in several steps
                "kv_cache_memory_bytes": 50 << 20,
                "enforce_eager": True,
            }
        ),
        **(changes or {}),
    }
    return ["features", *(f"--{name}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory) -> Path:
    """Extracted by a vLLM engine in a process of its own, vLLM's default."""
    out = tmp_path_factory.mktemp("features") / "out"
    code = "from vllm_specblock.cli.main import app\nif __name__ == '__main__':\n    app()"
    script = out.parent / "specblock.py"
    script.write_text(code)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, str(script), *arguments(data, out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.usefixtures("folder")
class TestThroughVLLM:
    pytestmark = runs_vllm

    def test_same_numbers_as_online(self, folder, data):
        ids = torch.arange(5, 2048, 9)
        online = OnlineTeacher(load_target(TARGET, "fp32", torch.device("cpu")), LAYERS, ids)
        stored = StoredTeacher(
            folder, TARGET, ids, "cpu", torch.float32, layer_ids=LAYERS, length=LENGTH
        )
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

    def test_again_is_done_at_once(self, folder, data):
        result = CliRunner().invoke(app, arguments(data, folder))
        assert result.exit_code == 0 and "whole already" in result.stdout

    def test_a_mix_of_options_is_refused(self, folder, data):
        result = CliRunner().invoke(app, arguments(data, folder, {"length": 32}))
        assert result.exit_code == 1
        assert "extracted with length = 48, not 32" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.engine
def test_what_vllm_refuses_is_one_sentence(data, tmp_path):
    pytest.importorskip("vllm", reason="runs real vLLM")
    engine = {"engine": '{"no_such_option": 1}'}
    result = CliRunner().invoke(app, arguments(data, tmp_path / "out", engine))
    assert result.exit_code == 1
    (said,) = [line for line in result.stderr.splitlines() if "Error: " in line]
    assert "vLLM cannot run the target" in said and "no_such_option" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length": 2048}, "a --length of 2047 at the most"),
        ({"layer-ids": "1,2,7"}, "from 0 to 6"),
        ({"target": "no/such/target"}, "no/such/target"),
        ({"data": "no/such/data"}, "no training data"),
    ],
)
def test_errors_come_before_vllm_does(data, tmp_path, changes, said):
    result = CliRunner().invoke(app, arguments(data, tmp_path / "out", changes))
    assert result.exit_code == 1
    assert said in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
