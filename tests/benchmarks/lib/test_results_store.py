"""Figures that go on after a kill, and never with those of other settings."""

from __future__ import annotations

import pytest
from lib import results_store
from lib.results_store import ResultsStore

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
