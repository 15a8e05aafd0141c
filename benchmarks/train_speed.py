"""Speed of `specblock train`'s own update, on random weights at the shape of a real target.

    python benchmarks/train_speed.py [--shape 8b] [--blocks 3] [--batch 4] [--json OUT]

`lib/synthetic_training.py` says how random weights come to a trained drafter's load; `--alpha` is
the share of positions that it gets right, and 1 counts every position, the most work there can be.
All of the text is counted: the prompts of chat data would spare some.

The trainer runs as it is, at a learning rate of next to nothing: the same arithmetic, and the load
stays. Features and p* lie on the device; with `--with-target` a random target computes them anew.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from lib.synthetic_training import (
    FAVOURITE,
    SHAPES,
    SameText,
    Shape,
    StillTeacher,
    make_drafter,
    make_text,
    online_teacher,
)
from lib.train_flops import Load, drafter_flops, load_of, teacher_flops
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters

from vllm_specblock.train import provenance
from vllm_specblock.train.config import TrainConfig, TrainError, parse
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.distributed_model import usable_device
from vllm_specblock.train.learner import LossOutput, TrainBatch
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.run import recipe
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target.features import OnlineTeacher, Teacher

_RATE = 1e-30
"""Learning rate: so small that no float32 weight moves."""

_PEAK = 989.0
"""Dense bf16 TFLOP/s of an H100 SXM or H200, by the data sheet."""


def make_trainer(
    config: TrainConfig, shape: Shape, teacher: Teacher, text: Batch, device: torch.device
) -> Trainer:
    """`specblock train`'s own trainer of a random drafter."""
    drafter = make_drafter(shape).to(device).train()
    learners = {"drafter": SpecBlockLearner(drafter, recipe(config, device))}
    return Trainer(config, learners, teacher, SameText(text), [], device, {})


@dataclass
class Watch:
    """A learner's forward hook: what every update did. Reads nothing off the device.

    Attributes:
        restart_positions: per update.
        num_positions: per update [M, K], on the device.
    """

    restart_positions: list[list[int]] = field(default_factory=list)
    num_positions: list[Tensor] = field(default_factory=list)

    def __call__(
        self, learner: SpecBlockLearner, train_batches: tuple[TrainBatch], outcome: LossOutput
    ) -> None:
        self.restart_positions.append(learner.restart_positions(train_batches[0]))
        self.num_positions.append(outcome.num_positions)

    def loads(self, right: Tensor, block: int) -> list[Load]:
        """Every update's load; right [B, L] as of `load_of`.

        Raises:
            TrainError: an update counted other positions.
        """
        loads = [
            load_of(right, restart_positions, block) for restart_positions in self.restart_positions
        ]
        for load, num_positions in zip(loads, self.num_positions):
            if load.num_positions != num_positions.long().tolist():
                raise TrainError("The drafter does not choose as it was made to: no figures.")
        return loads


def run_updates(trainer: Trainer, warmup: int) -> tuple[list[float], int | None, int]:
    """Run the trainer to its end.

    Returns:
        Wall seconds of each update, those of the warm-up too; then, of the updates after it, the
        most bytes that tensors took on the GPU (None on a CPU) and the graphs compiled.
    """
    cuda, seconds, graphs = trainer.device.type == "cuda", [], 0
    while trainer.step < trainer.steps:
        if trainer.step == warmup:
            graphs = counters["stats"]["unique_graphs"]
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        trainer.update()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return seconds, peak, counters["stats"]["unique_graphs"] - graphs


def measure(
    config: TrainConfig, shape: Shape, alpha: float, with_target: bool, warmup: int, peak: float
) -> dict[str, Any]:
    """All figures of `config.steps` updates, `warmup` of them not counted; peak in TFLOP/s."""
    device = usable_device(config.device)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    text = make_text(shape, config.batch, config.length, alpha)
    if with_target:
        teacher: Teacher = online_teacher(shape, device, dtype)
    else:
        teacher = StillTeacher(shape, text, device, dtype)
    trainer = make_trainer(config, shape, teacher, text, device)
    dist_model, watch = trainer.train_states["drafter"].dist_model, Watch()
    dist_model.module.register_forward_hook(watch)
    seconds, memory, graphs = run_updates(trainer, warmup)

    drafter = dist_model.learner.drafter
    loads = watch.loads(text.tokens == FAVOURITE, drafter.config.block_size)[warmup:]
    parts = [drafter_flops(drafter, load) for load in loads]
    if isinstance(teacher, OnlineTeacher):
        parts += [teacher_flops(teacher, config.batch, config.length)] * len(loads)
    timed = seconds[warmup:]
    flops = sum(part.total for part in parts)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": f"{config.precision} arithmetic, fp32 weights, gradients and AdamW state",
        "target": shape.target.to_diff_dict() | {"runs": with_target},
        "drafter": drafter.config.model_dump(mode="json"),
        "parameters": sum(weight.numel() for weight in drafter.parameters()),
        "recipe": vars(dist_model.learner.recipe),
        "batch": config.batch,
        "length": config.length,
        "alpha": alpha,
        "runs": len(timed),
        "first_update_s": seconds[0],
        "update_s": {
            "median": statistics.median(timed),
            "least": min(timed),
            "most": max(timed),
        },
        "tokens_per_s": config.batch * config.length * len(timed) / sum(timed),
        "peak_memory_gib": None if memory is None else memory / 2**30,
        "graphs_compiled_while_timed": graphs,
        "rows_per_update": sum(sum(load.rows) for load in loads) / len(loads),
        "fill_up": 1 - sum(sum(x.rows) for x in loads) / sum(sum(x.laid_out) for x in loads),
        "flops_per_update": flops / len(loads),
        "attention_share": sum(part.attention for part in parts) / flops,
        "tflops_per_s": flops / sum(timed) / 1e12,
        "peak_tflops_per_s": peak,
        "mfu": flops / sum(timed) / 1e12 / peak,
        **provenance.provenance(),
    }


def table(found: dict[str, Any]) -> Table:
    """What a reader wants first."""
    memory, times = found["peak_memory_gib"], found["update_s"]
    lines = {
        "device": found["device"],
        "drafter": f"{found['parameters'] / 1e6:,.0f} M parameters, M = "
        f"{found['recipe']['num_blocks']}, kernel {found['recipe']['kernel']}",
        "an update": f"{found['batch']} windows × {found['length']} tokens, α = {found['alpha']}",
        "training text": f"{found['tokens_per_s']:,.0f} tokens/s",
        "update, median": f"{times['median']:.4f} s of {found['runs']} "
        f"({times['least']:.4f} to {times['most']:.4f})",
        "first update": f"{found['first_update_s']:.2f} s",
        "compiled while timed": f"{found['graphs_compiled_while_timed']} graphs",
        "peak memory": "–" if memory is None else f"{memory:.1f} GiB",
        "model FLOPs": f"{found['flops_per_update'] / 1e12:,.3f} T per update, attention "
        f"{found['attention_share']:.1%}, target {'in' if found['target']['runs'] else 'not in'}",
        "rows that fill up": f"{found['fill_up']:.1%}",
        "MFU": f"{found['mfu']:.2%} of {found['peak_tflops_per_s']:g} TFLOP/s",
    }
    shown = Table(show_header=False)
    for name, value in lines.items():
        shown.add_row(name, value)
    return shown


def main(
    shape: Annotated[Literal["8b", "tiny"], typer.Option(help="Of the target.")] = "8b",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    blocks: Annotated[int, typer.Option(help="M, blocks drafted in a row.")] = 3,
    batch: Annotated[int | None, typer.Option(help="Windows of an update.")] = None,
    length: Annotated[int | None, typer.Option(help="Columns of a window.")] = None,
    updates: Annotated[int, typer.Option(min=1, help="Updates to time.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Updates before those.")] = 5,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Share of right choices.")] = 0.8,
    with_target: Annotated[bool, typer.Option(help="Run the target for each update.")] = False,
    recompute: Annotated[bool, typer.Option(help="Activation checkpointing.")] = False,
    kernel: Annotated[Literal["auto", "sdpa", "flex"], typer.Option(help="Attention.")] = "auto",
    compiled: Annotated[bool, typer.Option(help="Compile the drafter's forward.")] = False,
    peak: Annotated[float, typer.Option(min=1, help="The device's dense bf16 TFLOP/s.")] = _PEAK,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
) -> None:
    """Time updates and print a table."""
    of = SHAPES[shape]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = Path(".")  # the trainer is given text and target: it opens none of these
    config = parse(
        TrainConfig,
        **{"target": here, "data": here, "out": here},
        **{"batch": batch or of.batch, "length": length or of.length, "steps": updates + warmup},
        **{"num_blocks": blocks, "device": device, "lr": _RATE, "warmup": 0.0, "rank_from": 0},
        **{"recompute": recompute, "kernel": kernel, "compiled": compiled},
    )
    try:
        found = measure(config, of, alpha, with_target, warmup, peak)
    except torch.OutOfMemoryError as error:
        raise TrainError(
            f"{config.batch} windows of {config.length} tokens do not fit on {device}: give a "
            "smaller --batch, or --recompute."
        ) from error
    Console().print(table(found))
    if json_path:
        json_path.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except TrainError as error:
        raise SystemExit(f"Error: {error}") from None
