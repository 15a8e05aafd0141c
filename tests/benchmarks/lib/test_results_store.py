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


OTHERS = {
    "batch, more": {},
    "revision": {"git": {"folder": "f" * 40, "plugin": "f" * 40}},
    "versions": {"versions": {"python": "3.99.0"}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_results_of_other_settings_or_code_are_not_mixed(path, monkeypatch, other):
    facts = provenance.provenance() | OTHERS[other]
    monkeypatch.setattr(results_store.provenance, "provenance", lambda: facts)
    changes = {} if OTHERS[other] else {"batch": 2, "more": 0}
    with pytest.raises(SystemExit, match=f"results with other {other}: give another --out"):
        ResultsStore(path, {"dtype": "float32", "batch": 1} | changes)
