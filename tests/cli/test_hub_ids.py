"""Every command that takes the folder of a drafter or a target takes a hub id, too; no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from support.scripts import TARGET, specblock
from support.training import save_tokens

from vllm_specblock.drafters.common import hub

PROMPTS = '{"prompt": "def main(argv):"}\n'


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """Ids that a made-up hub was asked for: it has the example pair as org/drafter and
    org/target. What is not among the allowed files stays there."""
    ids: list[str] = []

    def download(name, allow_patterns, ignore_patterns=None, **_):
        ids.append(name)
        if name not in ("org/drafter", "org/target"):
            raise LocalEntryNotFoundError("offline")
        place = tmp_path / "hub" / name
        place.mkdir(parents=True, exist_ok=True)
        for path in TARGET.with_name(name.split("/")[1]).iterdir():
            allowed = any(path.match(pattern) for pattern in allow_patterns)
            if allowed and not any(path.match(each) for each in ignore_patterns or ()):
                shutil.copy(path, place)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    # No id is a folder here by chance.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS * 4)
    save_tokens(tmp_path / "texts.safetensors", [torch.arange(20)] * 4)
    return ids


COMMANDS = {
    "init": "init --target org/target --out out",
    "convert": "convert org/drafter --to ours --target org/target --out out",
    "inspect": "inspect org/drafter",
    "inspect a prompt": "inspect org/drafter --target org/target --prompt a --raw",
    "eval": "eval org/drafter --target org/target --data prompts.jsonl --prompts 1 "
    "--new-tokens 24 --temperature 0",
    "data": "data --target org/target --out out --input prompts.jsonl --max-length 99999",
    "train": "train --target org/target --init org/drafter --out out --dry-run "
    "--data texts.safetensors --length 16",
    "features": "features --target org/target --data prompts.jsonl --length 999999 --out out",
    "bench": "bench --target org/target --drafter specblock=org/drafter "
    "--set x=prompts.jsonl --method nowhere",
    "adapt run": "adapt run queue --drafter org/drafter --target org/target --once",
}
END_LATER = {
    "data": "but max_length is 99,999",
    "features": "needs one more than --length",
    "bench": "nowhere",
}
"""Commands that end with an error which they only find when they have read config.json: what else
they do takes an engine, or minutes."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hub_id_will_do(name, asked, tmp_path):
    (tmp_path / "queue").mkdir()
    result = specblock(*COMMANDS[name].split())
    if name in END_LATER:
        assert result.exit_code and END_LATER[name] in result.output, result.output
    else:
        assert result.exit_code == 0, (result.output, result.exception)
    assert set(asked) == {word.split("=")[-1] for word in COMMANDS[name].split() if "org/" in word}


def test_a_drafter_made_for_a_hub_id_names_it(asked, tmp_path):
    result = specblock(*COMMANDS["init"].split())
    assert result.exit_code == 0, result.output
    named = json.loads((tmp_path / "out" / "config.json").read_text())
    assert named["target"]["name"] == "org/target"
    assert named["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    # And so its target is found.
    asked.clear()
    words = COMMANDS["eval"].replace(" --target org/target", "").split()
    words[1] = "out"
    result = specblock(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert set(asked) == {"org/target"}


@pytest.mark.parametrize("name", ["inspect", "init"])
def test_one_sentence_where_there_is_none(name, asked):
    result = specblock(*COMMANDS[name].replace("org/", "other/").split())
    assert result.exit_code == 1
    said = "is neither a folder here nor a hub id that could be downloaded (LocalEntryNotFound"
    assert said in result.output and result.output.count("\n") == 1


def test_what_is_a_folder_here_is_not_asked_for(asked, tmp_path):
    (tmp_path / "org" / "drafter").mkdir(parents=True)
    for name in ("org/drafter", "no/such/folder", "./a/b", "/a/b", "gone", "~/x"):
        assert hub.drafter_folder(name) == hub.target_folder(name) == Path(name)
    assert not asked
