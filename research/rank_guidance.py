"""Does the rank head pay? Trees whose width it sets, beside uniform ones and its own ceiling.

    python research/rank_guidance.py DRAFTER --target TARGET --questions SET.jsonl

The target answers chat questions at T = 0 and 1; every tree is replayed along the same answers. τ ±
its standard error over steps, as if they were independent.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from branchings import branchings
from tqdm import tqdm

from vllm_specblock.bench.questions import read_questions, spread
from vllm_specblock.bench.table import markdown_table
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.data.prompts import prompt_ids
from vllm_specblock.train.eval.evaluate import TreeFigures, sequences_from
from vllm_specblock.train.eval.replay import Replay, check_steps, replay
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target.features import load_target, load_tokenizer

DEPTH = 8
"""Tokens that must follow a root for its step to count, for any M."""


def answered(
    target: Path,
    questions: list[Path],
    count: int,
    tokens: int,
    sampling_temperature: float,
    layers: tuple[int, ...],
) -> list[EvalSequence]:
    """The target's answers to `count` questions of each set, ready to be drafted along."""
    tokenizer = load_tokenizer(target)
    prompts = []
    for path in questions:
        for question in spread(read_questions(path), count):
            prompts.append(torch.tensor(prompt_ids(question.turns[0], tokenizer, chat=True)))
    model = load_target(target, "bf16", torch.device("cpu"))
    return list(
        sequences_from(
            model, prompts, tokens, temperature=sampling_temperature, seed=0, layer_ids=layers
        )
    )


def measure(
    drafter: Path,
    target: Path,
    questions: list[Path],
    count: int,
    tokens: int,
    nodes: list[int],
    blocks: int,
) -> list[dict]:
    """A row per temperature, N and tree."""
    model = checkpoint.load(drafter, torch.bfloat16, "cpu").eval()
    rows = []
    for sampling_temperature in (0.0, 1.0):
        layers = model.config.target.layer_ids
        sequences = answered(target, questions, count, tokens, sampling_temperature, layers)
        for budget in nodes:
            for name, make in tqdm(
                branchings(model, budget, blocks).items(), f"T = {sampling_temperature:g}"
            ):
                whole = Replay.join(
                    replay(make(sequence), sequence, DEPTH) for sequence in sequences
                )
                check_steps(whole, DEPTH)
                rows.append(
                    {
                        "T": sampling_temperature,
                        "N": budget,
                        "tree": name or "rank-guided, as served",
                    }
                    | asdict(TreeFigures.of(whole))
                )
    return rows


def table(rows: list[dict]) -> str:
    """A row per tree, a column per N and temperature."""
    columns = list(dict.fromkeys((row["N"], row["T"]) for row in rows))
    head = [
        "tree",
        *(f"N = {nodes}, T = {sampling_temperature:g}" for nodes, sampling_temperature in columns),
    ]
    found = {(row["tree"], row["N"], row["T"]): row for row in rows}
    lines = [head]
    for tree in dict.fromkeys(row["tree"] for row in rows):
        cells = (found[tree, *column] for column in columns)
        lines.append([tree, *(f"{cell['tau']:.3f} ± {cell['error']:.3f}" for cell in cells)])
    return markdown_table(lines)


def main(
    drafter: Annotated[Path, typer.Argument(help="Folder of a SpecBlock drafter.")],
    target: Annotated[Path, typer.Option(help="Folder of its target.")],
    questions: Annotated[list[Path], typer.Option(help="A .jsonl set; repeatable.")],
    count: Annotated[int, typer.Option(help="Questions of each set.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of every answer.")] = 128,
    nodes: Annotated[list[int] | None, typer.Option(help="N; repeatable.")] = None,
    blocks: Annotated[int, typer.Option(help="M.")] = 2,
    out: Annotated[Path, typer.Option(help="Takes all figures.")] = Path("runs/rank_guidance.json"),
) -> None:
    """Print the table."""
    rows = measure(drafter, target, questions, count, tokens, nodes or [12, 60], blocks)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(table(rows))


if __name__ == "__main__":
    typer.run(main)
