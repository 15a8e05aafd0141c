"""What is written beside a checkpoint: provenance, and a README.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_specblock.train import provenance
from vllm_specblock.train.eval import model_card
from vllm_specblock.train.run import train


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


TARGET = {"target_name": "maker/some: target"}


def rows(folder) -> dict[str, str]:
    lines = (folder / model_card.FILE).read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| ")]
    return {name: value for name, *rest in table if rest for value in rest}


def test_it_says_what_was_run_and_what_came_of_it(options):
    out = train(options(**TARGET, hold_out=3, eval_every=4), progress=False)
    facts = json.loads((out / "provenance.json").read_text())
    log = [json.loads(line) for line in (out / "training" / "log.jsonl").open()]
    judged = {entry["step"]: entry["tau"] for entry in log if "tau" in entry}
    assert set(judged) == {4, 6}
    for folder in (out, out / "best"):
        step = json.loads((folder / "provenance.json").read_text())["step"]
        said = rows(folder)
        assert said["target"] == "maker/some: target"
        assert said["data"] == f"d.safetensors, fingerprint `{facts['data']}`"
        assert said["updates"] == f"{step} of 4 windows × 24 tokens"
        assert said["τ"] == f"{judged[step]:.2f} tokens a step, replayed along 3 held-out texts"


def test_its_head_is_yaml_and_its_command_is_json(options):
    out = train(options(**TARGET), dry_run=True, progress=False)
    text = (out / model_card.FILE).read_text(encoding="utf-8")
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "maker/some: target"
    assert "vllm serve 'maker/some: target' --speculative-config" in text
    given = json.loads(text.split("--speculative-config \\\n")[1].split("\n")[0].strip(" '"))
    assert given == {"method": "specblock", "model": "FOLDER"}
    assert rows(out)["updates"].startswith("0 of ")
    assert rows(out)["τ"].startswith("not measured")
    train(options(), progress=False)
    assert rows(out)["updates"].startswith("6 of ")


def test_a_card_of_the_users_own_stays(options):
    out = train(options(steps=3), progress=False)
    path = out / model_card.FILE
    before = path.read_text(encoding="utf-8")
    mine = before.replace(model_card.MARK + "\n", "My own words.\n")
    path.write_text(mine, encoding="utf-8")
    train(options(steps=3), resume=False, progress=False)
    assert path.read_text(encoding="utf-8") == mine != before
