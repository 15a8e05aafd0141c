"""The mix of training prompts: shares, lengths, and the same again."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from support.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples/smollm2/prompts.py"


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


def write(path: Path, prompts: list[str]) -> Path:
    text = "".join(json.dumps({"prompt": prompt, "licence": "?"}) + "\n" for prompt in prompts)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def test_a_mix(script, tmp_path):
    files = [
        write(tmp_path / "gsm8k_train.jsonl.gz", [f"maths {i}" for i in range(100)]),
        write(tmp_path / "other.jsonl", [f"other {i}" for i in range(100)] + ["x" * 50, ""]),
        write(tmp_path / "small.jsonl", ["é"]),
    ]
    found = script.mix(files, 50, longest=20, seed=1)
    # Shares of 3, 1 and 1 of 50; the small one has no more.
    assert Counter(name for _, name in found) == {"gsm8k_train": 30, "other": 10, "small": 1}
    assert all(0 < len(prompt) <= 20 for prompt, _ in found)
    assert len(set(found)) == len(found)
    assert [name for _, name in found] != sorted(name for _, name in found)
    assert script.mix(list(reversed(files)), 50, longest=20, seed=1) == found
    assert script.mix(files, 50, longest=20, seed=2) != found


def test_the_command_writes_what_specblock_data_reads(script, tmp_path, monkeypatch, capsys):
    source = write(tmp_path / "a.jsonl", ["one", "two\nlines"])
    out = tmp_path / "deep" / "prompts.jsonl"
    monkeypatch.setattr("sys.argv", ["prompts.py", "--out", str(out), "--count", "9", str(source)])
    script.main()
    assert capsys.readouterr().out == f"2 prompts of 1 files are in {out}\n"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == ["one", "two\nlines"]
