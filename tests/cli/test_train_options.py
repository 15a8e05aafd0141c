"""`specblock train` as users call it: recipe, command line, help. Nothing is trained here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.train import run
from vllm_specblock.train.config import TrainConfig


@pytest.fixture
def called(monkeypatch):
    """What the trainer was called with, each time."""
    calls = []

    def train(config, **how):
        calls.append((config, how))

    monkeypatch.setattr(run, "train", train)
    return calls


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "target: T\ndata: D\nout: O\nlr: 1e-4\nbatch: 12\npack: false\nrecompute: true\n"
    )
    return path


def train(*arguments: str | Path):
    return CliRunner().invoke(app, ["train", *(str(argument) for argument in arguments)])


def test_the_command_line_wins_over_the_recipe(called, recipe):
    result = train(recipe, "--lr", "3e-4", "--pack", "--no-recompute", "--out", "elsewhere")
    assert result.exit_code == 0, result.output
    assert train(recipe).exit_code == 0
    (config, _), (alone, how) = called
    assert (config.lr, config.pack, config.recompute) == (3e-4, True, False)
    assert (config.out, config.target, config.batch) == (Path("elsewhere"), Path("T"), 12)
    assert (alone.lr, alone.batch, alone.pack, alone.recompute) == (1e-4, 12, False, True)
    assert alone.length == TrainConfig.model_fields["length"].default
    assert how == {"resume": True, "dry_run": False}


def test_options_of_every_kind(called):
    where = "--target", "T", "--data", "D", "--out", "O", "--features", "F"
    ranks = "--rank-topk", "full"
    result = train(*where, *ranks, "--layer-ids", "2,5,8", "--minutes", "2.5", "--no-valid-prefix")
    assert result.exit_code == 0, result.output
    config = called[0][0]
    assert (config.layer_ids, config.rank_topk) == ((2, 5, 8), "full")
    assert (config.minutes, config.valid_prefix, config.features) == (2.5, False, Path("F"))


def test_help_shows_every_option_with_its_default():
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, ["train", "--help"], env=wide)
    lines = [re.sub(r"[\s│]+", " ", line) for line in result.output.splitlines()]
    for name, field in TrainConfig.model_fields.items():
        option, default = name.replace("_", "-"), field.default
        (line,) = [line for line in lines if re.match(rf" ?--{option} ", line)]
        assert field.description in line
        if isinstance(default, bool):
            assert f"--no-{option}" in line
            default = option if default else f"no-{option}"
        if not field.is_required() and default is not None:
            assert f"[default: ({default})]" in line
        elif not field.is_required():
            assert name in {"steps", "minutes"} or "default" in line.lower()


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_specblock.cli.main import app;"
        "assert CliRunner().invoke(app, ['train', '--help']).exit_code == 0;"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
