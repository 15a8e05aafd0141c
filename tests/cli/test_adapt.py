"""`specblock adapt`: `simulate` on the example pair; `run`, `list` and `use` on a smaller one."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
from support.adapting import Pair
from typer.testing import CliRunner

from vllm_specblock.adapt.adaptation import AdaptationConfig
from vllm_specblock.adapt.learning.update import RATE
from vllm_specblock.adapt.link.folder_link import FolderLink
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.cli import adapt as commands
from vllm_specblock.cli.main import app
from vllm_specblock.cli.options import UpdateRate

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
    given = ["adapt", "simulate", PAIR / "drafter", "--target", PAIR / "target", *where, *more]
    return CliRunner().invoke(app, [str(each) for each in given])


def test_writes_figures_table_and_plot(prompts, tmp_path):
    out = tmp_path / "new" / "out"
    result = simulate(
        prompts,
        out,
        "--policy",
        "frozen",
        "--policy",
        "full every 8",
        "--requests",
        12,
        "--new-tokens",
        24,
        "--nodes",
        8,
        "--held-out",
        1,
        "--window",
        4,
        "--update-seconds",
        "1,2",
    )
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
    given = {name: each.default for name, each in signature(commands.simulate).parameters.items()}
    served, alone = TrainerConfig("D", "T"), AdaptationConfig()
    assert given["batch"] == served.batch == alone.batch
    assert given["lr"] == served.lr == alone.update.lr
    assert given["memory"] == served.memory == alone.memory


def test_help_names_the_rate_that_is_the_default():
    _, option = get_args(UpdateRate)
    assert f"Default: {RATE} / the drafter's width" in option.help


def test_seconds_are_a_pair(prompts, tmp_path):
    result = simulate(prompts, tmp_path / "out", "--update-seconds", "0.1")
    assert result.exit_code == 2 and "two numbers of seconds" in result.stderr


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


@pytest.fixture
def recorded(pair, tmp_path) -> Path:
    """A folder with 24 requests."""
    folder = tmp_path / "requests"
    versions = VersionFolder(folder / "versions", pair.drafter, pair.target)
    link = FolderLink(folder, versions, slots=64)
    for number in range(24):
        link.offer(*pair.request(number))
    link.close()
    return folder


def call(*given: str | int | Path):
    return CliRunner().invoke(app, ["adapt", *(str(each) for each in given)])


def train(pair: Pair, folder: Path, *more: str | int | Path):
    where = ["--drafter", pair.drafter, "--target", pair.target, "--once", "--seconds", 0]
    return call("run", folder, *where, "--policy", "always", "--actions", "all", *more)


def test_run_learns_from_a_folder_and_writes_versions(pair, recorded):
    result = train(pair, recorded)
    assert result.exit_code == 0, result.output
    assert "updates_full" in result.stdout and not list(recorded.glob("request-*"))
    out = recorded / "versions"
    name = VersionFolder(out).chosen()["version"]
    assert VersionFolder(out, pair.drafter, pair.target).current() == (out / name, None)
    told = call("list", out).stdout.splitlines()
    assert told[1].split() == ["delivered"]
    assert told[2].split()[:4] == ["*", name, "delivered", "full"] and len(told) == 3
    # It goes on from there.
    again = train(pair, recorded)
    assert again.exit_code == 0 and VersionFolder(out).chosen()["version"] == name


def test_use_is_a_persons_choice(pair, recorded, tmp_path):
    out = tmp_path / "out"
    assert train(pair, recorded, "--out", out).exit_code == 0
    name = VersionFolder(out).chosen()["version"]
    result = call("use", out, "delivered")
    assert result.exit_code == 0 and "delivered is current" in result.stdout
    assert VersionFolder(out).chosen().items() >= {"version": None, "by": "person"}.items()
    assert call("list", out).stdout.splitlines()[1].split() == ["*", "delivered"]
    assert call("use", out, name).exit_code == 0
    assert VersionFolder(out).chosen()["version"] == name


def test_wrong_folders_versions_and_policies_are_one_sentence(pair, recorded, tmp_path):
    out = tmp_path / "out"
    for result, message in (
        (train(pair, tmp_path / "none"), "There is no folder"),
        (train(pair, recorded, "--policy", "osd"), "no policy 'osd'"),
        (train(pair, recorded, "--actions", "trunk"), "must be heads or all"),
        (call("use", out, "delivered"), "There is no folder"),
        (call("use", recorded, "version-00009"), "no version version-00009"),
    ):
        assert result.exit_code == 1
        assert message in result.stderr and "Traceback" not in result.stderr
    assert len(list(recorded.glob("request-*"))) == 24


def test_one_trainer_for_a_folder(pair, recorded):
    folder = VersionFolder(recorded / "versions", pair.drafter, pair.target)
    folder.lock()
    result = train(pair, recorded)
    assert result.exit_code == 1 and "Another engine or trainer uses" in result.stderr
