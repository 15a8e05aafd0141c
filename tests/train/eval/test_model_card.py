"""The README.md of a trained drafter's folder."""

from __future__ import annotations

import json

import yaml

from vllm_specblock.train.eval import model_card
from vllm_specblock.train.run import train

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
