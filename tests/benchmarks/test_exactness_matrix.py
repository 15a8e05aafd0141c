"""Benchmarks: every combination of heads is in the matrix, and figures go on after a kill."""

from __future__ import annotations

import exactness
import pytest
import typer
from lib import results_store
from lib.results_store import ResultsStore

from vllm_specblock.config import parse_combine, parse_drafter, split_keys
from vllm_specblock.train import provenance


def test_every_pair_by_every_policy_with_keys_that_are_taken():
    known = exactness.combinations("one", "two", "eagle", 12)
    seen = set()
    for keys in known.values():
        first, second, how = split_keys(keys)
        kinds = tuple(head["kind"] for head in (first, second) if head)
        for head in (first, second):
            if head:
                head.pop("model", None)
                parse_drafter(head, head.pop("kind"))
        policy = parse_combine(how) if len(kinds) == 2 else None
        seen.add((kinds, policy and (policy.draft_policy, policy.merge)))
    pairs = [("specblock", kind) for kind in ("specblock", "eagle3", "ngram")]
    pairs += [("eagle3", "ngram")]
    ways = [("route", "trie"), ("merge", "disjoint"), ("merge", "trie")]
    alone = {((kind,), None) for kind in ("specblock", "eagle3", "ngram")}
    assert seen == alone | {(pair, way) for pair in pairs for way in ways}


def test_an_unknown_combination_is_one_sentence():
    with pytest.raises(typer.BadParameter, match="no combination 'x'; there are SpecBlock, "):
        exactness.main("x")


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
