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


def test_init_writes_what_its_options_say(target, tmp_path):
    sizes = "--block-size", 3, "--layers", 1, "--draft-vocab-size", 32, "--layer-ids", "1,3,8"
    given = *sizes, "--target-name", "org/target", "--qk-norm"
    result = specblock("init", "--target", target, "--out", tmp_path / "out", *given)
    assert result.exit_code == 0, result.output
    config = checkpoint.load(tmp_path / "out").config
    assert (config.block_size, config.num_hidden_layers, config.draft_vocab_size) == (3, 1, 32)
    assert config.target.layer_ids == (1, 3, 8)
    assert config.target.name == "org/target"
    assert config.qk_norm


@pytest.mark.parametrize("named", [None, (1, 4, 8)])
def test_convert_with_a_target_fills_in_what_is_not_published(target, tmp_path, named):
    """Layers that the checkpoint names win over the target's default."""
    llama = Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))
    if named:
        raw = json.loads((llama / "config.json").read_text())
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(named)}
        (llama / "config.json").write_text(json.dumps(raw))
    given = "--target", target, "--target-name", "org/target"
    result = specblock("convert", llama, "--out", tmp_path / "ours", *given)
    assert result.exit_code == 0, result.output
    config = checkpoint.read_config(tmp_path / "ours")
    assert config.target.layer_ids == (named or (2, 4, 6))
    assert config.target.name == "org/target"


def test_convert_refuses_what_does_not_belong_together(target, tmp_path):
    arguments = "convert", FIXTURES / "llama", "--out", tmp_path / "out"
    write_target(target, vocab_size=200)
    said = " ".join(specblock(*arguments, "--target", target).stderr.split())
    assert "vocab_size is 160, but that of" in said and "is 200" in said
    assert "without --target" in specblock(*arguments, "--layer-ids", "2,4,6").stderr


def test_convert_both_ways(target, tmp_path):
    ours, back = tmp_path / "ours", tmp_path / "back"
    result = specblock("convert", FIXTURES / "llama", "--out", ours, "--target", target)
    assert result.exit_code == 0, result.output
    assert checkpoint.read_config(ours).target.layer_ids == (2, 4, 6)
    result = specblock("convert", ours, "--out", back, "--to", "published")
    assert result.exit_code == 0, result.output
    assert (back / "vocab_mapping.pt").exists()


def test_inspect_shows_config_tensors_size_and_coverage():
    result = specblock("inspect", FIXTURES / "qwen")
    assert result.exit_code == 0, result.output
    assert '"block_size": 4' in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("shift_proj.0"))
    assert row.split(maxsplit=2) == ["shift_proj.0.weight", "float32", "[32, 64]"]
    assert "parameters: 39,040" in result.stdout
    assert "64 of 128 target tokens (50.0%)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "no/such/drafter"], "There is no directory"),
        (["init", "--target", "no/such/target", "--out", "unused"], "There is no directory"),
        (["convert", FIXTURES / "llama", "--out", FIXTURES / "llama"], "into itself"),
    ],
)
def test_errors_are_one_sentence_on_stderr(arguments, said):
    result = specblock(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/in/it"])
def test_an_out_that_cannot_be_a_folder(target, tmp_path, out):
    (tmp_path / "file").touch()
    arguments = ["init", "--target", target], ["convert", FIXTURES / "llama"]
    for each in arguments:
        result = specblock(*each, "--out", tmp_path / out)
        assert result.exit_code == 1, result.output
        assert str(tmp_path / "file") in result.stderr and result.stderr.count("\n") == 1


def test_layer_ids_that_are_not_three_numbers(target, tmp_path):
    result = specblock("init", "--target", target, "--out", tmp_path / "o", "--layer-ids", "2,x")
    assert result.exit_code == 2
    assert "is not 3 integers" in result.stderr
