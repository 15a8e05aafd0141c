"""Every combination of heads is in the matrix, and a failing one fails the whole."""

from __future__ import annotations

import subprocess

import exactness
import pytest
import typer

from vllm_specblock.config import parse_combine, parse_drafter, split_keys


def test_every_pair_by_every_policy_with_keys_that_are_taken():
    known = exactness.combinations("one", "two", "eagle", 12)
    seen = set()
    for keys in known.values():
        first, second, how = split_keys(keys)
        kinds = tuple(head["head"] for head in (first, second) if head)
        for head in (first, second):
            if head:
                head.pop("model", None)
                parse_drafter(head, head.pop("head"))
        policy = parse_combine(how) if len(kinds) == 2 else None
        seen.add((kinds, policy and (policy.head_policy, policy.route, policy.merge)))
    pairs = [
        ("specblock", "specblock"),
        ("specblock", "eagle3"),
        ("specblock", "ngram"),
        ("eagle3", "ngram"),
    ]
    ways = [
        ("route", "eager", "trie"),
        ("route", "lazy", "trie"),
        ("merge", "eager", "disjoint"),
        ("merge", "eager", "trie"),
    ]
    assert seen == {((kind,), None) for kind in ("specblock", "eagle3", "ngram")} | {
        (pair, way) for pair in pairs for way in ways
    }


def test_all_runs_each_and_fails_with_any(monkeypatch, capsys):
    calls = []

    def called(command):
        calls.append(command)
        bad = any("n-gram, lazy" in word for word in command)
        return subprocess.CompletedProcess(command, int(bad))

    monkeypatch.setattr(exactness.subprocess, "run", called)
    with pytest.raises(typer.Exit) as ended:
        exactness.main("all", tokens=5, nodes=9)
    known = exactness.combinations("a", "b", "c", 9)
    assert ended.value.exit_code == 1 and len(calls) == len(known)
    assert all("--tokens=5" in command and "--nodes=9" in command for command in calls)
    said = capsys.readouterr().out
    assert f"{len(known) - 2} of {len(known)} combinations are exact" in said
    assert "not exact, or failed: EAGLE-3 + n-gram, lazy route" in said


def test_an_unknown_combination_is_one_sentence():
    with pytest.raises(SystemExit, match=r"^--combination 'x' is not known; there are: SpecBlock;"):
        exactness.main("x")
