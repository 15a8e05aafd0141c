"""The command `simulate` on the example pair."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
from adaptation import app
from adaptation_simulation import simulate as simulate_command
from typer.testing import CliRunner

from vllm_specblock.adapt.learning.update import AdaptationConfig
from vllm_specblock.adapt.trainer.trainer import TrainerConfig

PAIR = Path(__file__).parents[2] / "examples" / "tiny_pair"
CODE = ["import os\nimport sys\n", "class Reader:\n", "def add(a, b):\n", "for line in file:\n"]
TABLES = ["    'a': 1,\n    'b': 2,\n", "    0x80: 0x20ac,\n", "    (1, 2),\n    (3, 4),\n"]


@pytest.fixture
def prompts(tmp_path) -> list[Path]:
    paths = [tmp_path / "code.jsonl", tmp_path / "tables.jsonl"]
    for path, texts in zip(paths, (CODE, TABLES)):
        lines = [json.dumps({"prompt": text * k}) + "\n" for k in (1, 2, 3) for text in texts]
        path.write_text("".join(lines))
    return paths


def simulate(prompts: list[Path], out: Path, *more: str | int):
    where = ["--home", prompts[0], "--away", prompts[1], "--out", out]
    given = ["simulate", PAIR / "drafter", "--target", PAIR / "target", *where, *more]
    return CliRunner().invoke(app, [str(each) for each in given])


def test_writes_figures_table_and_plot(prompts, tmp_path):
    out = tmp_path / "new" / "out"
    sizes = "--requests 12 --new-tokens 24 --nodes 8 --held-out 1 --window 4 --update-seconds 1,2"
    policies = "--policy", "frozen", "--policy", "full every 8"
    result = simulate(prompts, out, *policies, *sizes.split())
    assert result.exit_code == 0, result.output
    whole = json.loads((out / "simulation.json").read_text())
    assert (
        whole["seconds"]["update"] == {"heads": 1.0, "full": 2.0} and "torch" in whole["versions"]
    )
    found = whole["results"]["switch"]
    assert list(found) == ["frozen", "full every 8"]
    assert found["frozen"]["training_share"] == 0 < found["full every 8"]["training_share"]
    assert found["full every 8"]["updates"] == {"full": 1}
    assert found["frozen"]["tau_by_phase"]["home"] > 1
    assert len(found["frozen"]["held_out"]) == 2
    table = (out / "simulation.md").read_text()
    assert table in result.stdout and "| full every 8 |" in table
    assert (out / "tau_switch.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "given, message",
    [
        (("--policy", "osd"), "no policy 'osd'"),
        (("--stream", "swich"), "no stream 'swich'"),
        (("--requests", 60), "holds 12 prompts"),
    ],
)
def test_wrong_options_are_one_sentence(prompts, tmp_path, given, message):
    result = simulate(prompts, tmp_path / "out", *given)
    assert result.exit_code == 1
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_simulated_learns_as_serving_does():
    options = signature(simulate_command).parameters
    given = {name: each.default for name, each in options.items()}
    served, alone = TrainerConfig("D", "T"), AdaptationConfig()
    assert given["batch"] == alone.batch
    assert given["lr"] == served.lr == alone.lr
    assert given["memory"] == served.memory == alone.memory


def test_seconds_are_a_pair(prompts, tmp_path):
    result = simulate(prompts, tmp_path / "out", "--update-seconds", "0.1")
    assert result.exit_code == 2 and "two numbers of seconds" in result.stderr
