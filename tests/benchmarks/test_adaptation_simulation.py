"""The command `streams` on the example pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adaptation import app
from typer.testing import CliRunner

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


def streams(prompts: list[Path], out: Path, *more: str | int):
    where = ["--home", prompts[0], "--away", prompts[1], "--out", out]
    given = ["--drafter", PAIR / "drafter", "--target", PAIR / "target", *where, *more]
    return CliRunner().invoke(app, ["streams", *map(str, given)])


def test_replays_each_policy_and_resumes(prompts, tmp_path):
    out = tmp_path / "new" / "out"
    sizes = "--requests 12 --new-tokens 24 --nodes 8 --seeds 1"
    policies = "--stream", "switch", "--policy", "frozen", "--policy", "full every 8"
    result = streams(prompts, out, *policies, *sizes.split())
    assert result.exit_code == 0, result.output
    found = json.loads((out / "streams.json").read_text())["results"]
    assert list(found) == ["switch, seed 0: frozen", "switch, seed 0: full every 8"]
    frozen, learned = found.values()
    assert frozen["training_share"] == 0 < learned["training_share"]
    assert learned["updates"] == {"full": 1} and frozen["tau_by_phase"]["home"] > 1
    assert "| switch | full every 8 |" in result.stdout
    again = streams(prompts, out, *policies, *sizes.split())
    assert again.exit_code == 0 and again.stdout == result.stdout
    assert "seed 0" in result.stderr and "seed 0" not in again.stderr
