"""Options as users give them: recipe, command line, help; a mistake is one sentence."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from support.processes import run_python
from support.scripts import EAGLE3, ROOT, SPECBLOCK, TARGET, specblock
from support.targets import write_target
from support.training import save_tokens

from vllm_specblock.bench import run as bench_run
from vllm_specblock.bench.config import MethodSpec
from vllm_specblock.train import run as train_run
from vllm_specblock.train.config import TrainConfig


@pytest.fixture
def called(monkeypatch):
    """What the trainer or `specblock bench` was called with, each time; nothing is run."""
    calls = []
    monkeypatch.setattr(train_run, "train", lambda config, **how: calls.append((config, how)))

    def prepare(config):
        calls.append((config, {}))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "prepare", prepare)
    return calls


def test_the_command_line_wins_over_the_recipe(called, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "target: T\ndata: D\nout: O\nbatch: 12\npack: no\nrecompute: true\n"
        "lr: 1e-4\n"  # no number in YAML 1.1, which wants 1.0e-4: a string that is one
        "layer_ids: [2, 5, 8]\nrank_topk: full\nmicro_batch: 6\n"
    )
    changes = "--lr", "3e-4", "--pack", "--no-recompute", "--out", "elsewhere"
    result = specblock("train", recipe, *changes)
    assert result.exit_code == 0, result.output
    assert specblock("train", recipe).exit_code == 0
    (config, _), (alone, how) = called
    assert (config.lr, config.pack, config.recompute) == (3e-4, True, False)
    assert (config.out, config.target, config.batch) == (Path("elsewhere"), Path("T"), 12)
    assert (alone.lr, alone.batch, alone.pack, alone.recompute) == (1e-4, 12, False, True)
    assert (alone.layer_ids, alone.rank_topk, alone.micro_batch) == ((2, 5, 8), "full", 6)
    assert alone.length == TrainConfig.model_fields["length"].default
    assert how == {"resume": True, "dry_run": False}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "train --target T --data D --out O --features F --rank-topk full --layer-ids 2,5,8 "
            "--minutes 2.5 --no-valid-prefix",
            {"layer_ids": (2, 5, 8), "rank_topk": "full", "minutes": 2.5, "valid_prefix": False}
            | {"features": Path("F")},
        ),
        (
            "bench --target T --set S --set b=U --method plain --method wide --nodes 12 --raw "
            "--drafter specblock=D --drafter eagle3=E --temperature 0 --temperature 0.7 "
            """--define '{"wide": {"base": "ngram"}}' --template-options '{"think": false}'""",
            {"set": ("S", "b=U"), "method": ("plain", "wide"), "nodes": 12, "raw": True}
            | {"drafter": {"specblock": Path("D"), "eagle3": Path("E")}, "temperature": (0.0, 0.7)}
            | {"define": {"wide": MethodSpec(base="ngram")}, "template_options": {"think": False}},
        ),
    ],
)
def test_options_of_every_kind(called, line, expected):
    specblock(*shlex.split(line))
    ((config, _),) = called
    assert {name: getattr(config, name) for name in expected} == expected


def test_help_shows_every_option_with_its_default():
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1", "TERM": "dumb"}
    result = specblock("train", "--help", env=wide)
    lines = [re.sub(r"[\s│]+", " ", line) for line in result.output.splitlines()]
    for name, field in TrainConfig.model_fields.items():
        option, default = name.replace("_", "-"), field.default
        (line,) = [line for line in lines if re.match(rf" ?--{option} ", line)]
        assert field.description in line
        if isinstance(default, bool):
            assert f"--no-{option}" in line
            default = option if default else f"no-{option}"
        if not field.is_required() and default is not None:
            assert f"[default: ({default})]" in line
        elif not field.is_required():
            assert name in {"steps", "minutes"} or "default" in line.lower()


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_specblock.cli.main import app;"
        "assert CliRunner().invoke(app, ['train', '--help']).exit_code == 0;"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    assert run_python("-c", code) == ["[]"]


WORDS = {"TARGET": TARGET, "DRAFTER": SPECBLOCK, "EAGLE3": EAGLE3}
WORDS["LLAMA"] = ROOT / "tests/fixtures/llama"
WORDS["PAIR"] = f"{SPECBLOCK} --target {TARGET}"
WORDS["BENCH"] = f"bench --target {TARGET} --set q=q.jsonl --raw --out out"
WORDS["FEATURES"] = f"features --target {TARGET} --data tokens.safetensors --out out"

MISTAKES = {
    "init --target no/such/target --out out": "There is no directory",
    "init --target w160 --out file/in/it": "file",
    "convert LLAMA --out LLAMA": "into itself",
    "convert LLAMA --out out --target w200": "vocab_size is 160, but that of",
    "inspect no/such/drafter": "There is no directory",
    "inspect EAGLE3 --prompt a": "names no target",
    "inspect PAIR --prompt ''": "The prompt is empty",
    "inspect PAIR --svg a.svg": "give one with --prompt",
    "eval DRAFTER --target other --data q.jsonl": "vocab_size is 2048, but that",
    "eval PAIR --data none": "There are no prompts at",
    "eval PAIR --data empty.jsonl": "None of the lines",
    "eval PAIR --data q.jsonl --device cuda:7": "The device cuda:7 cannot be used",
    "eval . --data q.jsonl": "There is no ",
    "eval DRAFTER --data q.jsonl": "is for examples/tiny_pair/target, which is no folder here",
    "features --target no/target --data q.jsonl --length 9 --out out": "no/target",
    "FEATURES --length 2048": "give --length 2047 or less",
    "FEATURES --length 48 --layer-ids 1,2,7": "from 0 to 6",
    f"features --target {TARGET} --data none --out out --length 48": "no training data",
    "bench --set q.jsonl": "The option target is missing.",
    "BENCH --drafter D": "drafter must be NAME=FOLDER",
    "BENCH --temperature -1": "Option temperature.0: ",
    'BENCH --define \'{"a": {"spec": {}}}\'': "There is no option define.a.spec",
    "BENCH --max-new-tokens 99999": "The longest chat may take 100032 tokens",
    "BENCH --max-model-len 64": "but there is room for 64: lower --max-new-tokens",
    "train none.yaml": "There is no recipe none.yaml.",
    "chat DRAFTER": "tiny_pair/drafter has no tokenizer.",
    "chat http://127.0.0.1:1": "The server at http://127.0.0.1:1 gave no answer",
}
USAGE = {
    "inspect PAIR --prompt a --svg .": "is a directory",
    "eval PAIR --data q.jsonl --json .": "is a directory",
    "FEATURES --length 48 --layer-ids 2,x": "is not 3 integers",
    "chat TARGET --model DRAFTER --speculative-config {}": "drop one",
    f"data --target {TARGET} --input q.jsonl --out out --engine [1]": "not a JSON object",
    "train --target T --bacth 3": "--batch",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_target(folder / "w160")
    write_target(folder / "w200", vocab_size=200)
    (folder / "other").mkdir()
    config = json.loads((TARGET / "config.json").read_text()) | {"vocab_size": 999}
    (folder / "other/config.json").write_text(json.dumps(config))
    (folder / "q.jsonl").write_text('{"id": "a", "turns": ["one"], "prompt": "one"}\n')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "file").touch()
    save_tokens(folder / "tokens.safetensors", [torch.arange(20)])
    return folder


NEEDED = "target: T\ndata: D\nout: O\n"
RECIPES = {
    NEEDED + "bacth: 3": "There is no option bacth; did you mean batch?",
    NEEDED + "quux: 4": "There is no option quux.",
    NEEDED + "lr: quick": "Option lr: ",
    NEEDED + "precision: fp16": "Option precision: ",
    NEEDED + "layer_ids: [2, 4]": "layer_ids",
    NEEDED + "rank_topk: most": "Option rank_topk",
    NEEDED + "batch: 8\nmicro_batch: 3": "batch 8 must be a multiple of micro_batch 3.",
    NEEDED + "length: 9\nblock_size: 8": "length 9 is too short for a block of 8 positions.",
    "target:\ndata: D\nout: O": "Option target: ",
    "target: T\nout: O": "The option data is missing.",
    "lr: {a": "is not YAML",
    "lr: \xff\xfe": "is not YAML",
    "- lr\n- 3": "must map options to values",
    "": "must map options to values",
}


def call_line(line: str):
    for word, value in WORDS.items():
        line = line.replace(word, str(value))
    return specblock(*shlex.split(line))


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(files, monkeypatch, line):
    monkeypatch.chdir(files)
    assert_mistake(line, MISTAKES[line])
    assert not (files / "out").exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_mistake_in_a_recipe_is_one_sentence(tmp_path, recipe):
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="latin-1")
    assert_mistake(f"train {tmp_path}/recipe.yaml", RECIPES[recipe])


def assert_mistake(line: str, said: str) -> None:
    result = call_line(line)
    assert result.exit_code == 1, result.output
    (message,) = result.stderr.strip().splitlines()
    assert message.startswith("Error: ") and said in message
    assert result.stdout == ""


@pytest.mark.parametrize("line", USAGE)
def test_an_option_that_cannot_be_parsed(files, monkeypatch, line):
    monkeypatch.chdir(files)
    result = call_line(line)
    assert result.exit_code == 2 and USAGE[line] in result.stderr
