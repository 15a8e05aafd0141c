"""What is written beside a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specblock.train import provenance


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of one commit, which git knows no other around."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", f"{tmp_path.parent}:{tmp_path}")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "file").write_text("one\n")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True)
    return folder


def test_the_revision_is_the_commits_with_changes(repository):
    head = (repository / ".git" / "HEAD").read_text().split()[-1]
    commit = (repository / ".git" / head).read_text().strip()
    (repository / "sub").mkdir()
    assert provenance.revision(repository / "sub") == provenance.revision(repository) == commit
    (repository / "sub" / "other").write_text("x")
    assert provenance.revision(repository) == commit + "+changes"
    assert provenance.revision(repository, new_files=False) == commit
    (repository / "file").write_text("two\n")
    assert provenance.revision(repository, new_files=False) == commit + "+changes"


def test_without_a_repository_or_git_there_is_no_revision(repository, tmp_path, monkeypatch):
    assert provenance.revision(tmp_path) is None
    monkeypatch.setenv("PATH", str(repository))
    assert provenance.revision(repository) is None


def test_the_command_can_be_pasted(repository, monkeypatch):
    monkeypatch.chdir(repository)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/specblock", "train", "--out", "a folder"])
    facts = provenance.provenance()
    assert facts["command"] == "specblock train --out 'a folder'"
    assert facts["git"]["folder"] == provenance.revision(repository)
    assert facts["git"]["plugin"] == provenance.revision(Path(provenance.__file__).parent)
