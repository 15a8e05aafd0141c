"""What stands under examples/: every recipe parses, every quoted command exists, and the chain
from corpus to table runs, at a size at which nothing is learned."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer
import yaml
from comparison import Comparison
from pydantic import BaseModel
from support.processes import run_python

from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.cli.main import app
from vllm_specblock.config import (
    DEFAULT_NODES,
    SOURCE_KEYS,
    check_num_nodes,
    parse_combine,
    parse_drafter,
    split_keys,
)
from vllm_specblock.train.config import TrainConfig, parse, read_recipe

ROOT = Path(__file__).resolve().parents[2]
STDLIB = ROOT / "examples/stdlib_100m"
RECIPES = sorted(ROOT.glob("examples/recipes/*.yaml"))
YAMLS = sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("benchmarks/**/*.yaml")])
PLACES = ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))

PAPER = {"block_size": 4, "num_layers": 2, "num_blocks": 2, "draft_vocab_size": 32000, "batch": 96}
PAPER |= {"epochs": 20.0, "steps": None, "lr": 5e-5, "warmup": 0.015, "clip": 0.5}
PAPER |= {"rank_from": 2000, "precision": "bf16"}
"""Sections 4.1 and A.1; the rest are ablations, which are off by default."""

SHELL = {"|", ">", "&&", ";", "&"}
"""Words that end a command's own."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[list[str]]:
    """The words of every command in a page's fenced blocks that is ours."""
    found = []
    for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.M | re.S):
        if kind not in ("", "bash", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            ours = r"\s*(specblock |torchrun .*vllm_specblock |python \S+\.py|\S*vllm serve )"
            if re.match(ours, line):
                found.append(shlex.split(line, comments=True))
    return found


def program(script: Path, monkeypatch):
    """What a script of ours hands to typer, as a command of click."""
    handed = []
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(typer, "run", handed.append)
    runpy.run_path(str(script), run_name="__main__")
    (function,) = handed
    of_script = typer.Typer()
    of_script.command()(function)
    return typer.main.get_command(of_script)


def model_of(recipe: Path) -> type[BaseModel]:
    given = read_recipe(recipe)
    if "method" in given:
        return BenchConfig
    # Of `specblock train` it is no option.
    return Comparison if "prompts" in given else TrainConfig


@pytest.mark.parametrize("path", YAMLS, ids=name_of)
def test_a_recipe_parses(path):
    given = {}
    if model_of(path) is BenchConfig:  # the command line may say what to measure
        given = {"target": "T", "set": ["one=F"], "out": "O"}
    parse(model_of(path), **given | read_recipe(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_have_the_papers_values_for_one_eight_or_sixteen_gpus(path):
    config = parse(TrainConfig, **read_recipe(path))
    assert {name: getattr(config, name) for name in PAPER} == PAPER
    assert config.prefix_broadcast and config.layer_shift and config.valid_prefix
    for gpus in (1, 8, 16):
        assert config.batch % (gpus * config.micro_batch) == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_exist(page, monkeypatch):
    specblock = typer.main.get_command(app)
    for words in commands(page):
        if words[:1] == ["python"]:
            script, rest = ROOT / words[1], words[2:]
            if "typer.run(" not in script.read_text():  # it takes no options
                continue
            command = program(script, monkeypatch)
        elif "serve" in words[:2]:
            if "--speculative-config" in words:
                options = json.loads(words[words.index("--speculative-config") + 1])
                first, second, combine = split_keys(options)
                for head in (first, second or {}):
                    keys = {k: v for k, v in head.items() if k not in (*SOURCE_KEYS, "adapt")}
                    if "adapt" in head:
                        AdaptConfig(**head["adapt"])
                    parse_drafter(keys, head.get("kind", "specblock"))
                parse_combine(combine)
                check_num_nodes(options.get("num_speculative_tokens", DEFAULT_NODES))
            continue
        else:
            _, *rest = words[words.index("vllm_specblock") :] if words[0] == "torchrun" else words
            command, rest = specblock.commands[rest[0]], rest[1:]
        rest = rest[: next((i for i, word in enumerate(rest) if word in SHELL), None)]
        given = {} if "--help" in rest else command.make_context(words[0], list(rest)).params
        recipe = given.get("recipe")
        if recipe is not None and not recipe.stem.isupper():  # RECIPE is the reader's
            options = {k: v for k, v in given.items() if v not in (None, ())}
            model = model_of(ROOT / recipe)
            options = {k: v for k, v in options.items() if k in model.model_fields}
            parse(model, **read_recipe(ROOT / recipe) | options)


def test_the_chain_from_corpus_to_table(tmp_path):
    """`run.py` with the committed recipe, shrunk."""
    small = read_recipe(STDLIB / "comparison.yaml") | {
        "drafters": "specblock, EAGLE-3",
        "draft_vocab_size": 256,
        "length": 32,
        "batch": 2,
        "micro_batch": 1,
        "steps": 2,
        "rank_from": 1,
        "num_prompts": 1,
        "new_tokens": 16,
        "nodes": 8,
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small, allow_unicode=True))
    work = tmp_path / "work"

    def run(minutes: float) -> str:
        words = ["--size", "nano", "--device", "cpu", "--seeds", "0", "--minutes", minutes]
        words += ["--recipe", tmp_path / "small.yaml", "--work", work]
        return "\n".join(run_python(STDLIB / "run.py", *words))

    assert "All is done" in run(30)
    results = (work / "results.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|$", results, re.M)
    uniform = "− rank-guided branching"
    assert rows == ["specblock", "EAGLE-3", "paper's branching", uniform]
    judged = work / "comparison/seed-0/comparison.json"
    updates, written = json.loads(judged.read_text())["updates"], judged.stat().st_mtime_ns
    assert updates == 2
    assert "All is done" in run(30) and judged.stat().st_mtime_ns == written
