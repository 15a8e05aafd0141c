"""Commands on a drafter's folder: convert, inspect, eval."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support import scripts
from support.scripts import EAGLE3, ROOT, SPECBLOCK, TARGET
from support.targets import write_target

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.eval.evaluate import sequences_from
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.target.features import load_target, load_tokenizer

PROMPTS = ["import os\nimport sys\n\n\ndef main():\n", "class Reader:\n", "def add(a, b):\n"]
NODE = re.compile(r'^[│├└─ ]*("(?:[^"\\]|\\.)*")  (0\.\d\d|1\.00)  ([bl])(\d)(  ✓)?$')


def specblock(*arguments: str | Path | int) -> str:
    """What a command that succeeds prints."""
    result = scripts.specblock(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("named", [None, (1, 4, 8)])
def test_convert_with_a_target_fills_in_what_is_not_published(tmp_path, named):
    """Layers that the checkpoint names win over the target's default."""
    llama = Path(shutil.copytree(ROOT / "tests/fixtures/llama", tmp_path / "llama"))
    if named:
        raw = json.loads((llama / "config.json").read_text())
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(named)}
        (llama / "config.json").write_text(json.dumps(raw))
    ours, target = tmp_path / "ours", write_target(tmp_path / "target")
    specblock("convert", llama, "--out", ours, "--target", target)
    specblock("convert", ours, "--out", tmp_path / "b", "--to", "published")
    config = checkpoint.read_config(ours)
    assert config.target.layer_ids == (named or (2, 4, 6))
    assert config.target.name == str(target)
    assert (tmp_path / "b/vocab_mapping.pt").exists()


@pytest.mark.parametrize(("drafter", "letter", "forwards"), [(SPECBLOCK, "b", 2), (EAGLE3, "l", 4)])
def test_the_tree_and_what_the_target_accepts(drafter, letter, forwards, tmp_path):
    target, tokenizer = load_target(TARGET, "fp32", torch.device("cpu")), load_tokenizer(TARGET)
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    new = target.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    answer = [tokenizer.decode([token]) for token in new]
    svg = tmp_path / "new" / "tree.svg"
    asked = "--prompt", PROMPTS[0], "--raw", "--nodes", 16
    shown = specblock("inspect", drafter, "--target", TARGET, *asked, "--svg", svg)
    lines = shown.splitlines()
    found = [match for match in map(NODE.match, lines) if match]
    assert len(found) == 16 and {match[3] for match in found} == {letter}
    assert {int(match[4]) for match in found} <= set(range(1, forwards + 1))
    accepted = [json.loads(match[1]) for match in found if match[5]]
    (bonus,) = (line.split('"', 1)[1] for line in lines if line.endswith("bonus token"))
    bonus = json.loads('"' + bonus.removesuffix("  bonus token"))
    assert f"{json.dumps(answer[0])}  root" in lines
    assert accepted and [*accepted, bonus] == answer[1 : len(accepted) + 2]
    assert f"accepted tokens: {len(accepted)}\n" in shown
    drawn = "".join(ElementTree.parse(svg).getroot().itertext()).replace("\xa0", " ")
    assert len(re.findall(rf"(?:0\.\d\d|1\.00)  {letter}\d", drawn)) == 16
    assert drawn.count("✓") == len(accepted) + 1 and "bonus token" in drawn  # and the legend's


def test_config_tensors_size_and_coverage():
    shown = specblock("inspect", ROOT / "tests/fixtures/qwen")
    assert '"block_size": 4' in shown and "parameters: 39,040" in shown
    assert re.search(r"\nshift_proj\.0\.weight +float32 +\[32, 64\]\n", shown)
    assert "64 of 128 target tokens (50.0%)" in shown


def test_a_prompt_goes_through_the_chat_template():
    arguments = "inspect", SPECBLOCK, "--target", TARGET, "--prompt", "Sum?"
    assert "# user: Sum?" in specblock(*arguments, "--nodes", 4)
    raw = specblock(*arguments, "--raw")
    assert "# user:" not in raw
    assert "12 nodes, drafter forwards: 1," in raw  # as served on a CPU
    # As Python reads other bytes of a command line.
    other = scripts.specblock("inspect", SPECBLOCK, "--prompt", "caf\udce9")
    assert other.exit_code == 1 and "--prompt is not valid UTF-8" in other.stderr


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def evaluated(prompts: Path, out: Path, *more):
    """Evaluate two prompts at T = 0 and at those that `more` adds."""
    given = "--target", TARGET, "--data", prompts, "--prompts", 2, "--temperature", 0
    return specblock("eval", SPECBLOCK, *given, "--raw", "--json", out, *more)


def test_table_and_file_say_what_replay_finds(prompts, tmp_path):
    out = tmp_path / "new" / "figures.json"
    sizes = "--nodes", 16, "--nodes", 30, "--blocks", 3, "--seed", 5
    options = "--new-tokens", 40, "--temperature", 0.8, *sizes, "--no-calibrate-drafts"
    shown = evaluated(prompts, out, *options)
    figures = json.loads(out.read_text())
    assert (figures["device"], figures["dtype"], figures["prompts"]) == ("cpu", "float32", 2)
    assert figures["seed"] == 5 and "torch" in figures["versions"]
    tokenizer, target = load_tokenizer(TARGET), load_target(TARGET, "fp32", torch.device("cpu"))
    drafter = checkpoint.load(SPECBLOCK)
    ids = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS[:2]]
    for entry, temperature in zip(figures["results"], (0.0, 0.8)):
        sequences = list(
            sequences_from(target, ids, 40, temperature=temperature, seed=5, layer_ids=(2, 3, 4))
        )
        assert entry["temperature"] == temperature
        for nodes in (16, 30):
            shape = serving_shape(drafter, SpecBlockConfig(num_blocks=3), nodes)
            whole = replay(lambda s, shape=shape: draft_trees(drafter, s, shape), sequences, 12)
            found = entry["trees"][f"tree of {nodes}"]
            assert (found["tau"], found["steps"]) == (whole.tau, len(whole.accepted))
            assert f"{whole.tau:.3f} ± " in shown
        assert len(entry["chain"]["alpha"]) == 12
        assert "chain of 3 blocks" in entry["trees"]
    assert figures["results"][0]["trees"]["tree of 30"]["tau"] > 2.5  # a trained drafter


def test_scores_are_set_right_unless_told_otherwise(prompts, tmp_path):
    found = []
    for extra in ((), ("--no-calibrate-drafts",)):
        out = tmp_path / "figures.json"
        evaluated(prompts, out, "--new-tokens", 60, "--nodes", 12, *extra)
        found.append(json.loads(out.read_text())["results"][0]["trees"]["tree of 12"])
    served, drafted = found
    assert served["sharpness"] > 1.3 and drafted["sharpness"] == 1
    assert served["tau"] > drafted["tau"]
