"""Every combination of heads is in the matrix, and a failing one fails the whole."""

from __future__ import annotations

import re
import subprocess
import sys

import exactness
import pytest
import typer

from vllm_specblock.config import parse_combine, parse_drafter, split_keys


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


def test_all_runs_each_and_fails_with_any(monkeypatch, capsys):
    calls = []

    def called(command):
        calls.append(command)
        bad = any("n-gram, route" in word for word in command)
        return subprocess.CompletedProcess(command, int(bad))

    monkeypatch.setattr(exactness.subprocess, "run", called)
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--tokens=5", "--nodes=9"])
    with pytest.raises(typer.Exit) as ended:
        exactness.main("all", tokens=5, nodes=9)
    known = exactness.combinations("a", "b", "c", 9)
    assert ended.value.exit_code == 1 and len(calls) == len(known)
    assert all("--tokens=5" in command and "--nodes=9" in command for command in calls)
    said = capsys.readouterr().out
    assert f"{len(known) - 2} of {len(known)} combinations are exact" in said
    assert "not exact, or failed: EAGLE-3 + n-gram, route" in said


@pytest.mark.engine
def test_one_combination_under_swaps():
    """The short form; all of them are compared by `benchmarks/exactness.py --swaps`."""
    command = [sys.executable, exactness.__file__, "--swaps", "--tokens=100"]
    said = subprocess.run([*command, "--combination=SpecBlock"], capture_output=True, text=True)
    found = re.fullmatch(
        r"SpecBlock: (\d+) tokens compared in \d+ s, 0 different \(float32, batch 8, "
        r"(\d+) swaps, (\d+) drafts accepted\)\n",
        said.stdout,
    )
    assert found and not said.returncode, said.stderr
    compared, swaps, accepted = map(int, found.groups())
    assert compared >= 3840 and swaps > 500 and accepted > 300


def test_an_unknown_combination_is_one_sentence():
    with pytest.raises(typer.BadParameter, match="no combination 'x'; there are SpecBlock, "):
        exactness.main("x")
