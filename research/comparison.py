"""The controlled comparison: tables 1 and 2 of the paper.

    python research/comparison.py examples/tiny_pair/comparison.yaml

The drafters learn one after the other, each in OUT/NAME, from the same texts in the same order, and
are judged by the same replay, one per temperature. With `features` the target runs only once for
all. A stopped run resumes. With `minutes` in the recipe a call ends after so many and asks to be
called again.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import drafter_zoo
import torch
import typer
from pydantic import Field
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.bench.results import markdown_table
from vllm_specblock.cli.options import options_of
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.data.prompts import read_prompts
from vllm_specblock.train.data.shards import write_json
from vllm_specblock.train.distributed import ranks, world
from vllm_specblock.train.eval.drafting import draft_trees, serving_shape
from vllm_specblock.train.eval.evaluate import TreeFigures, sequences_from
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.learner import Learner, TrainBatch
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.run import make_teacher, prepare, sequences_of
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target.features import load_target, load_tokenizer

_CALIBRATION = 8  # batches that Falcon's static tree is shaped by
UNIFORM = "− rank-guided branching"
PAPER = "paper's branching"


class Comparison(RunConfig):
    """Options of the comparison: those of a training run, and:"""

    drafters: str = Field(default="all", description="Names with commas between them, or all.")
    num_blocks: int = Field(default=2, ge=1, description="M, blocks that SpecBlock learns.")
    intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="Width of SpecBlock's MLPs, and by its parameters the size of all others; "
        "default: the target's.",
    )
    rank_from: int = Field(default=2000, ge=0, description="First update with the rank loss.")
    loss_floor: float = Field(default=0.25, ge=0, le=1, description="See `specblock train`.")
    prompts: Path = Field(description=".jsonl of prompts that the drafters are judged on.")
    num_prompts: int = Field(default=24, ge=1, description="How many of them.")
    new_tokens: int = Field(default=160, ge=16, description="Tokens of the target per prompt.")
    nodes: int = Field(default=60, ge=1, le=256, description="N, nodes of each tree.")
    depth: int = Field(
        default=8, ge=1, description="Tokens that must follow a root for a step to count."
    )

    @property
    def names(self) -> list[str]:
        """The drafters that take part."""
        if self.drafters == "all":
            return list(drafter_zoo.EVERYONE)
        return [name.strip() for name in self.drafters.split(",")]


@options_of(Comparison)
def compare(config: Comparison) -> None:
    """Train every drafter on the same lessons, replay them, print the table."""
    deadline = time.monotonic() + 60 * config.minutes if config.minutes else None
    with ranks(config.device) as device:
        run_context = prepare(config, device, shortest=12)
        footing = drafter_zoo.Footing(config, run_context)
        teacher = make_teacher(config, run_context, footing.t2d, device)
        sequences = sequences_of(run_context, teacher, device)
        trainers = {}
        for name in config.names:
            changes: dict[str, Any] = {"out": config.out / name}
            if deadline:
                changes["minutes"] = (deadline - time.monotonic()) / 60
            trainer = trainers[name] = Trainer(
                config.model_copy(update=changes),
                drafter_zoo.make(name, footing).to(device).train(),
                teacher,
                run_context.windows,
                sequences,
                device,
                run_context.facts,
            )
            trainer.restore()
            trainer.run()
            if trainer.step < trainer.steps:
                return
        if world()[0] == 0:
            if "Falcon" in trainers:
                calibrate(trainers["Falcon"])
            judge(config, trainers, footing.layer_ids, device, deadline)


@torch.no_grad()
def calibrate(trainer: Trainer) -> None:
    """Shape Falcon's static tree by training text, once it has learned, and save it again."""
    train_batches = []
    for step in range(_CALIBRATION):
        batch = trainer.windows.batch(step, trainer.micro, trainer.config.seed).to(trainer.device)
        target_outputs = trainer.teacher.teach(batch)
        train_batches.append(
            TrainBatch(batch, target_outputs, trainer.teacher.embed, trainer.step, seed=step)
        )
    learner = trainer.train_state.learner
    learner.float().calibrate(train_batches)
    learner.save(trainer.config.out)


def judge(
    config: Comparison,
    trainers: dict[str, Trainer],
    layer_ids: tuple[int, int, int],
    device: torch.device,
    deadline: float | None,
) -> None:
    """Replay all drafters along greedy and sampled texts; OUT/results.json keeps each result."""
    path = config.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    target = load_target(config.target, config.precision, device)
    prompts = read_prompts(config.prompts, load_tokenizer(config.target), config.num_prompts)
    for temperature in (0.0, 1.0):
        how = {"temperature": temperature, "seed": config.seed, "layer_ids": layer_ids}
        sequences = list(sequences_from(target, prompts, config.new_tokens, **how))
        for name, make_draft in contestants(config, trainers).items():
            key = f"{name} T={temperature:g}"
            if key in results:
                continue
            if deadline and time.monotonic() > deadline:
                print("Time is up: call again to go on.")
                return
            began = time.monotonic()
            reach = TreeFigures.of(replay(make_draft, sequences, config.depth))
            results[key] = {
                "tau": round(reach.tau, 4),
                "error": round(reach.error, 4),
                "steps": reach.steps,
                "nodes": round(reach.nodes, 1),
                "seconds": round(time.monotonic() - began, 1),
            }
            write_json(path, results)
    learners = {name: trainer.train_state.learner for name, trainer in trainers.items()}
    logs = {name: trainer.train_state.metrics_log.entries for name, trainer in trainers.items()}
    first = next(iter(trainers.values()))
    summary = {
        "results": results,
        "parameters": {name: drafter_zoo.parameters(each) for name, each in learners.items()},
        "loss_floor": {
            name: learner.recipe.loss_floor
            for name, learner in learners.items()
            if isinstance(learner, SpecBlockLearner)
        },
        "alpha": {name: last_alpha(entries) for name, entries in logs.items()},
        "seconds_of_training": sum(
            max(entry.get("seconds", 0.0) for entry in entries) for entries in logs.values()
        ),
        "updates": first.step,
        "facts": first.facts,
    }
    write_json(config.out / "comparison.json", summary)
    print(table(summary))


def last_alpha(entries: list[dict[str, Any]]) -> list[list[float]]:
    """α per block and position over the last tenth of the log lines, from training text."""
    lines = [torch.tensor(entry["alpha"]) for entry in entries if "alpha" in entry]
    last = lines[-max(1, len(lines) // 10) :]
    return [[round(a, 3) for a in block] for block in torch.stack(last).mean(0).tolist()]


def contestants(config: Comparison, trainers: dict[str, Trainer]) -> dict[str, Any]:
    """Return the drafts to replay: of each drafter, and of SpecBlock with other trees."""
    found: dict[str, Any] = {}
    for name, trainer in trainers.items():
        learner: Learner = trainer.train_state.learner
        if isinstance(learner, SpecBlockLearner):
            learner.shape = serving_shape(learner.drafter, nodes=config.nodes)
        found[name] = learner.draft_along
    if "specblock" in trainers:
        drafter = trainers["specblock"].train_state.learner.drafter
        uniform = uniform_shape(serving_shape(drafter, SpecBlockConfig(), config.nodes))
        papers = serving_shape(drafter, SpecBlockConfig(branching=[2, 4, 6, 4]), config.nodes)
        draft = partial(draft_trees, drafter)
        found |= {PAPER: partial(draft, shape=papers), UNIFORM: partial(draft, shape=uniform)}
    return found


def uniform_shape(shape: TreeShape) -> TreeShape:
    """Ablation: one width at every position, the least from 2 on with 1.5 times as many candidates
    as the budget: those of equal text join, and the tree has to be full."""
    cells = shape.rows(shape.num_blocks) * shape.block_size
    width = max(2, -(-3 * shape.budget // (2 * cells)))
    return replace(shape, branching=(width,) * 4)


def table(summary: dict[str, Any]) -> str:
    """Return the comparison in Markdown."""
    rows = [["drafter", "M parameters", "loss floor", "drafter forwards", "τ, T=0", "τ, T=1"]]
    rows[0].append("α₁ … (training text)")
    results = summary["results"]
    for name in dict.fromkeys(key.rpartition(" T=")[0] for key in results):
        of = "specblock" if name in (UNIFORM, PAPER) else name
        blocks = summary["alpha"].get(of, [])
        taus = [results.get(f"{name} T={t}") for t in (0, 1)]
        floor = summary["loss_floor"].get(of)
        rows.append(
            [
                *(name, f"{summary['parameters'].get(of, 0) / 1e6:.2f}"),
                *("–" if floor is None else f"{floor:g}", str(FORWARDS.get(of, 2))),
                *(f"{r['tau']:.2f} ± {r['error']:.2f}" if r else "–" for r in taus),
                " \\| ".join(" ".join(f"{a:.2f}" for a in block) for block in blocks),
            ]
        )
    return markdown_table(rows)


FORWARDS = {"EAGLE-3": 7, "DFlash": 1, "JetSpec": 1, "Medusa": 1, "ParallelSpec": 1}
FORWARDS |= {"Falcon": 3, "SpS": 5}
"""Drafter forwards per step, one after the other; SpecBlock's variants take M = 2."""

if __name__ == "__main__":
    try:
        typer.run(compare)
    except (CheckpointError, TrainError) as error:
        raise SystemExit(f"Error: {error}") from None
