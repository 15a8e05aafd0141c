"""What is written of a drafter: fresh weights, provenance, a README.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.targets import LLAMA3, edit_config, write_target

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train import provenance
from vllm_specblock.train.eval import model_card
from vllm_specblock.train.run import train
from vllm_specblock.train.untrained import init


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "target")


def test_init_follows_the_target(target):
    write_target(target, rope_parameters={"rope_theta": 5e5, **LLAMA3}, head_dim=32)
    edit_config(target, rope_theta=...)
    config = init(target, layer_ids=(1, 2, 8)).config
    assert (config.rope_theta, config.rope_scaling) == (5e5, LLAMA3)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 2, 96)
    assert init(target, intermediate_size=24).layers[0].mlp.gate_proj.weight.shape == (24, 64)
    assert config.target.layer_ids == (1, 2, 8)
    assert config.target.name == str(target)
    assert config.draft_vocab_size == 160
    assert not config.qk_norm


def test_init_gives_qwen3_targets_a_qk_norm(target):
    write_target(target, model_type="qwen3")
    state = init(target).state_dict()
    for name in ("q_norm", "k_norm"):
        assert state[f"layers.1.self_attn.{name}.weight"].shape == (16,)
    assert not init(target, qk_norm=False).config.qk_norm


def test_init_starts_without_a_shift(target):
    drafter = init(target, num_layers=3)
    wanted = torch.cat([torch.eye(64), torch.zeros(64, 64)], dim=1)
    for shift in drafter.shift_proj:
        assert torch.equal(shift.weight, wanted)
    assert (drafter.norm.weight == 1).all()


def test_init_is_seeded_and_leaves_the_global_generator_alone(target):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, again, other = (init(target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_init_maps_the_first_or_the_most_frequent_ids(target):
    first = init(target, draft_vocab_size=32)
    assert torch.equal(torch.arange(32) + first.d2t, torch.arange(32))
    assert torch.equal(first.t2d, torch.arange(160) < 32)
    counts = torch.zeros(160, dtype=torch.int64)
    frequent = torch.tensor([150, 3, 77, 76, 9, 11, 20, 21, 22, 100])
    counts[frequent] = torch.arange(10, 0, -1)
    drafter = init(target, draft_vocab_size=12, token_counts=counts)
    wanted = torch.cat([frequent, torch.tensor([0, 1])]).sort().values  # ties: lower ids
    assert torch.equal(torch.arange(12) + drafter.d2t, wanted)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"model_type": "gemma3"}, {}, "llama and qwen3 with 'silu'"),
        ({"hidden_act": "gelu"}, {}, "llama and qwen3 with 'silu'"),
        ({"vocab_size": None}, {}, "vocab_size = None"),
        ({"num_hidden_layers": 1}, {}, "--layer-ids"),
        ({}, {"layer_ids": (2, 2, 5)}, "from 0 to 8"),
        ({}, {"layer_ids": (-1, 3, 5)}, "from 0 to 8"),
        ({}, {"block_size": 0}, "'block_size' = 0"),
        ({}, {"draft_vocab_size": 161}, "must not exceed vocab_size, 160"),
    ],
)
def test_init_refuses_other_targets_and_impossible_sizes(target, changes, options, said):
    edit_config(target, **changes)
    with pytest.raises(CheckpointError, match=said):
        init(target, **options)


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
        assert said["τ"] == f"{judged[step]:.2f} tokens per step, replayed along 3 held-out texts"


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
