"""The prompts of the two slices: whose files they are from, and that they are the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import load_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def prompts():
    return load_script(EXAMPLES / "two_heads/prompts.py")


@pytest.fixture
def library(tmp_path):
    """Forty files of code and forty of tables, each line with its file's name on it."""
    for index in range(80):
        name = f"encodings/t{index}.py" if index % 2 else f"c{index}.py"
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"# {name} {line}\n" for line in range(250)))
    return tmp_path


def test_the_same_again_and_never_of_a_held_out_file(prompts, library, tmp_path, monkeypatch):
    paths = {"stdlib": str(library)}
    monkeypatch.setattr(prompts.corpus.sysconfig, "get_paths", lambda: paths)
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        prompts.main(folder)
    for name in prompts.SLICES:
        for held_out, file in ((False, f"{name}.jsonl"), (True, f"{name}_held_out.jsonl")):
            one, two = ((folder / file).read_bytes() for folder in folders)
            assert one == two
            found = [json.loads(line)["prompt"] for line in one.decode().splitlines()]
            assert found and len(found) <= (prompts.HELD_OUT if held_out else prompts.LEARNED)
            assert len(found) < 3 or found != sorted(found), "they are in random order"
            # A piece may begin within a file, never within a line.
            names = {line.split()[1] for piece in found for line in piece.splitlines()}
            assert {prompts.corpus.is_held_out(each) for each in names} == {held_out}
