"""`specblock convert`: between layouts, and what it fills in."""

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


@pytest.mark.parametrize("named", [None, (1, 4, 8)])
def test_convert_with_a_target_fills_in_what_is_not_published(tmp_path, named):
    """Layers that the checkpoint names win over the target's default."""
    llama = Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))
    if named:
        raw = json.loads((llama / "config.json").read_text())
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(named)}
        (llama / "config.json").write_text(json.dumps(raw))
    ours, target = tmp_path / "ours", write_target(tmp_path / "target")
    for line in (
        f"convert {llama} --out {ours} --target {target}",
        f"convert {ours} --out {tmp_path}/b --to published",
    ):
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, result.output
    config = checkpoint.read_config(ours)
    assert config.target.layer_ids == (named or (2, 4, 6))
    assert config.target.name == str(target)
    assert (tmp_path / "b/vocab_mapping.pt").exists()
