"""Commands on a drafter's folder: convert, inspect."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support.targets import write_target
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.target.features import load_target, load_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize("named", [None, (1, 4, 8)])
def test_convert_with_a_target_fills_in_what_is_not_published(tmp_path, named):
    """Layers that the checkpoint names win over the target's default."""
    llama = Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))
    if named:
        raw = json.loads((llama / "config.json").read_text())
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(named)}
        (llama / "config.json").write_text(json.dumps(raw))
    ours, target = tmp_path / "ours", write_target(tmp_path / "target")
    for line in (
        f"convert {llama} --out {ours} --target {target}",
        f"convert {ours} --out {tmp_path}/b --to published",
    ):
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, result.output
    config = checkpoint.read_config(ours)
    assert config.target.layer_ids == (named or (2, 4, 6))
    assert config.target.name == str(target)
    assert (tmp_path / "b/vocab_mapping.pt").exists()


EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = EXAMPLES / "tiny_pair" / "target"
SPECBLOCK, EAGLE3 = EXAMPLES / "tiny_pair" / "drafter", EXAMPLES / "two_heads" / "eagle3"
PROMPT = "import os\nimport sys\n\n\ndef main():\n"
NODE = re.compile(r'^[│├└─ ]*("(?:[^"\\]|\\.)*")  (0\.\d\d|1\.00)  ([bl])(\d)(  ✓)?$')


def inspect(*arguments: str | Path | int):
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize(("drafter", "letter", "forwards"), [(SPECBLOCK, "b", 2), (EAGLE3, "l", 4)])
def test_the_tree_and_what_the_target_accepts(drafter, letter, forwards, tmp_path):
    target, tokenizer = load_target(TARGET, "fp32", torch.device("cpu")), load_tokenizer(TARGET)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    new = target.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    answer = [tokenizer.decode([token]) for token in new]
    svg = tmp_path / "new" / "tree.svg"
    asked = "--prompt", PROMPT, "--raw", "--nodes", 16
    result = inspect(drafter, "--target", TARGET, *asked, "--svg", svg)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    found = [match for match in map(NODE.match, lines) if match]
    assert len(found) == 16 and {match[3] for match in found} == {letter}
    assert {int(match[4]) for match in found} <= set(range(1, forwards + 1))
    accepted = [json.loads(match[1]) for match in found if match[5]]
    (bonus,) = (line.split('"', 1)[1] for line in lines if line.endswith("bonus token"))
    bonus = json.loads('"' + bonus.removesuffix("  bonus token"))
    assert f"{json.dumps(answer[0])}  root" in lines
    assert accepted and [*accepted, bonus] == answer[1 : len(accepted) + 2]
    assert f"accepted tokens: {len(accepted)}\n" in result.stdout
    drawn = "".join(ElementTree.parse(svg).getroot().itertext()).replace("\xa0", " ")
    assert len(re.findall(rf"(?:0\.\d\d|1\.00)  {letter}\d", drawn)) == 16
    assert drawn.count("✓") == len(accepted) + 1 and "bonus token" in drawn  # and the legend's


def test_config_tensors_size_and_coverage():
    result = inspect(EXAMPLES.parent / "tests/fixtures/qwen")
    assert '"block_size": 4' in result.stdout and "parameters: 39,040" in result.stdout
    assert re.search(r"\nshift_proj\.0\.weight +float32 +\[32, 64\]\n", result.stdout)
    assert "64 of 128 target tokens (50.0%)" in result.stdout


def test_a_prompt_goes_through_the_chat_template():
    arguments = ["--target", TARGET, "--prompt", "Sum?"]
    assert "# user: Sum?" in inspect(SPECBLOCK, *arguments, "--nodes", 4).stdout
    raw = inspect(SPECBLOCK, *arguments, "--raw").stdout
    assert "# user:" not in raw
    assert "12 nodes, drafter forwards: 1," in raw  # as served on a CPU
