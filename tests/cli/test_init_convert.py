"""The commands that make, convert and show drafter directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.targets import write_target
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.specblock import checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "target")


def specblock(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("named", [None, (1, 4, 8)])
def test_convert_with_a_target_fills_in_what_is_not_published(target, tmp_path, named):
    """Layers that the checkpoint names win over the target's default."""
    llama = Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))
    if named:
        raw = json.loads((llama / "config.json").read_text())
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(named)}
        (llama / "config.json").write_text(json.dumps(raw))
    result = specblock("convert", llama, "--out", tmp_path / "ours", "--target", target)
    assert result.exit_code == 0, result.output
    config = checkpoint.read_config(tmp_path / "ours")
    assert config.target.layer_ids == (named or (2, 4, 6))
    assert config.target.name == str(target)
    result = specblock("convert", tmp_path / "ours", "--out", tmp_path / "b", "--to", "published")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "b/vocab_mapping.pt").exists()


def test_inspect_shows_config_tensors_size_and_coverage():
    result = specblock("inspect", FIXTURES / "qwen")
    assert result.exit_code == 0, result.output
    assert '"block_size": 4' in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("shift_proj.0"))
    assert row.split(maxsplit=2) == ["shift_proj.0.weight", "float32", "[32, 64]"]
    assert "parameters: 39,040" in result.stdout
    assert "64 of 128 target tokens (50.0%)" in result.stdout
