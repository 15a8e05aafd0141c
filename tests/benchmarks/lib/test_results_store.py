"""Figures that go on after a kill, and never with somebody else's."""

from __future__ import annotations

import json

import pytest
from lib import results_store
from lib.results_store import MEASURED, ROOT, ResultsStore, from_root, weights

from vllm_specblock.train import provenance


@pytest.fixture
def path(tmp_path):
    """Results of one setting."""
    path = tmp_path / "r.json"
    ResultsStore(path, {"dtype": "float32", "batch": 1}).add("a", {"tau": 1})
    return path


def test_a_killed_run_goes_on(path):
    again = ResultsStore(path, {"dtype": "float32", "batch": 1})
    assert again.results == {"a": {"tau": 1}} and "a" in again and "b" not in again


def test_results_of_other_settings_are_not_mixed(path):
    with pytest.raises(SystemExit, match=r"results with other batch, more: give another --out"):
        ResultsStore(path, {"dtype": "float32", "batch": 2, "more": 0})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("revision", {"git": {"folder": "f" * 40, "plugin": "f" * 40}}),
        ("versions", {"versions": {"python": "3.99.0"}}),
    ],
)
def test_nor_are_those_of_other_code(path, monkeypatch, name, change):
    facts = {**provenance.provenance(), **change}
    monkeypatch.setattr(results_store.provenance, "provenance", lambda: facts)
    with pytest.raises(SystemExit, match=f"results with other {name}: give another --out"):
        ResultsStore(path, {"dtype": "float32", "batch": 1})


def test_results_are_of_the_code_that_their_run_began_with(tmp_path, monkeypatch):
    began = provenance.provenance()
    going = ResultsStore(tmp_path / "r.json", {})
    changed = {**began, "git": {"folder": "f" * 40, "plugin": "f" * 40}}
    monkeypatch.setattr(results_store.provenance, "provenance", lambda: changed)
    going.add("a", 1)
    assert json.loads((tmp_path / "r.json").read_text())["provenance"]["git"] == began["git"]


def test_results_name_nobodys_folders(tmp_path):
    assert from_root(ROOT / "examples/tiny_pair/target") == "examples/tiny_pair/target"
    assert from_root(tmp_path / "drafter") == str(tmp_path / "drafter")


def test_weights_tell_checkpoints_apart(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert a == b != c


def test_no_call_goes_on_with_the_figures_of_this_repository():
    """Whoever calls a benchmark has a machine of their own; git does not know its results."""
    ignored = (ROOT / ".gitignore").read_text().split()
    assert f"{MEASURED.relative_to(ROOT).parts[0]}/" in ignored
    for script in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("research/**/*.py")]:
        source = script.read_text(encoding="utf-8")
        assert '"benchmarks/results' not in source, script.name
        assert "Ledger(" not in source or "MEASURED" in source, script.name
