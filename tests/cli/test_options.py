"""Options as users give them: recipe, command line, help. Nothing is trained or measured here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_specblock.bench import run as bench_run
from vllm_specblock.bench.config import MethodSpec
from vllm_specblock.cli.main import app
from vllm_specblock.train import run as train_run
from vllm_specblock.train.config import TrainConfig


@pytest.fixture
def called(monkeypatch):
    """What the trainer or `specblock bench` was called with, each time; nothing is run."""
    calls = []
    monkeypatch.setattr(train_run, "train", lambda config, **how: calls.append((config, how)))

    def prepare(config):
        calls.append((config, {}))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "prepare", prepare)
    return calls


def call(*words: str | Path):
    return CliRunner().invoke(app, [*map(str, words)])


def test_the_command_line_wins_over_the_recipe(called, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "target: T\ndata: D\nout: O\nbatch: 12\npack: no\nrecompute: true\n"
        "lr: 1e-4\n"  # no number in YAML 1.1, which wants 1.0e-4: a string that is one
        "layer_ids: [2, 5, 8]\nrank_topk: full\nmicro_batch: 6\n"
    )
    changes = "--lr", "3e-4", "--pack", "--no-recompute", "--out", "elsewhere"
    result = call("train", recipe, *changes)
    assert result.exit_code == 0, result.output
    assert call("train", recipe).exit_code == 0
    (config, _), (alone, how) = called
    assert (config.lr, config.pack, config.recompute) == (3e-4, True, False)
    assert (config.out, config.target, config.batch) == (Path("elsewhere"), Path("T"), 12)
    assert (alone.lr, alone.batch, alone.pack, alone.recompute) == (1e-4, 12, False, True)
    assert (alone.layer_ids, alone.rank_topk, alone.micro_batch) == ((2, 5, 8), "full", 6)
    assert alone.length == TrainConfig.model_fields["length"].default
    assert how == {"resume": True, "dry_run": False}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "train --target T --data D --out O --features F --rank-topk full --layer-ids 2,5,8 "
            "--minutes 2.5 --no-valid-prefix",
            {"layer_ids": (2, 5, 8), "rank_topk": "full", "minutes": 2.5, "valid_prefix": False}
            | {"features": Path("F")},
        ),
        (
            "bench --target T --set S --set b=U --method plain --method wide --nodes 12 --raw "
            "--drafter specblock=D --drafter eagle3=E --temperature 0 --temperature 0.7 "
            """--define '{"wide": {"base": "ngram"}}' --template-options '{"think": false}'""",
            {"set": ("S", "b=U"), "method": ("plain", "wide"), "nodes": 12, "raw": True}
            | {"drafter": {"specblock": Path("D"), "eagle3": Path("E")}, "temperature": (0.0, 0.7)}
            | {"define": {"wide": MethodSpec(base="ngram")}, "template_options": {"think": False}},
        ),
    ],
)
def test_options_of_every_kind(called, line, expected):
    call(*shlex.split(line))
    ((config, _),) = called
    assert {name: getattr(config, name) for name in expected} == expected


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
