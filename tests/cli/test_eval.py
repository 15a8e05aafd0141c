"""`specblock eval` on the example pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.eval.evaluate import sequences_from
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.target.features import load_target, load_tokenizer

PAIR = Path(__file__).parents[2] / "examples" / "tiny_pair"
DRAFTER, TARGET = PAIR / "drafter", PAIR / "target"
PROMPTS = ["import os\nimport sys\n\n\ndef main():\n", "class Reader:\n", "def add(a, b):\n"]


def specblock(*arguments: str | Path | int):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def evaluated(prompts: Path, out: Path, *more):
    """Evaluate two prompts at T = 0 and at those that `more` adds."""
    given = "--target", TARGET, "--data", prompts, "--prompts", 2, "--temperature", 0
    return specblock("eval", DRAFTER, *given, "--json", out, *more)


def test_table_and_file_say_what_replay_finds(prompts, tmp_path):
    out = tmp_path / "new" / "figures.json"
    sizes = "--nodes", 16, "--nodes", 30, "--blocks", 3, "--seed", 5
    options = "--new-tokens", 40, "--temperature", 0.8, *sizes, "--no-calibrate-drafts"
    result = evaluated(prompts, out, *options)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert (figures["device"], figures["dtype"], figures["prompts"]) == ("cpu", "float32", 2)
    assert figures["seed"] == 5 and "torch" in figures["versions"]
    tokenizer, target = load_tokenizer(TARGET), load_target(TARGET, "fp32", torch.device("cpu"))
    drafter = checkpoint.load(DRAFTER)
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
            assert f"{whole.tau:.3f} ± " in result.stdout
        assert len(entry["chain"]["alpha"]) == 12
        assert "chain of 3 blocks" in entry["trees"]
    assert figures["results"][0]["trees"]["tree of 30"]["tau"] > 2.5  # a trained drafter


def test_scores_are_set_right_unless_told_otherwise(prompts, tmp_path):
    found = []
    for extra in ((), ("--no-calibrate-drafts",)):
        out = tmp_path / "figures.json"
        result = evaluated(prompts, out, "--new-tokens", 60, "--nodes", 12, *extra)
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_text())["results"][0]["trees"]["tree of 12"])
    served, drafted = found
    assert served["sharpness"] > 1.3 and drafted["sharpness"] == 1
    assert served["tau"] > drafted["tau"]
