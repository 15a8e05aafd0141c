"""`specblock train`: training of a SpecBlock drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train import provenance, untrained
from vllm_specblock.train.config import RunConfig, TrainConfig, TrainError
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.data.packed_dataset import PackedDataset, load_texts, token_counts
from vllm_specblock.train.data.shards import Text
from vllm_specblock.train.distributed import ranks, world
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.loop import STATE_DIR, Trainer
from vllm_specblock.train.optimizers import slow_arithmetic
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target import feature_store, target_rows
from vllm_specblock.train.target.features import (
    OnlineTeacher,
    StoredTeacher,
    Teacher,
    load_target,
)
from vllm_specblock.train.target.target_info import check_target, describe_target

_SHAPE = {"block_size", "num_layers", "intermediate_size", "rank_topk", "block_rope"}
_SHAPE |= {"prefix_broadcast", "layer_shift"}
"""Options that are arguments of `untrained.init`."""

PROMPT_SHARE = 4
"""A held-out text without a prompt uses its first 1 / PROMPT_SHARE."""


def train(
    config: TrainConfig, resume: bool = True, progress: bool = True, dry_run: bool = False
) -> Path:
    """Train a drafter and write it to `config.out`, as vLLM loads it; returns that folder. The
    state lies in `config.out/training`. A resumed run ends in the weights of an unbroken one.

    Args:
        resume: continue from the last save; otherwise start anew and replace it.
        progress: show a progress bar, on the first rank.
        dry_run: stop before the first update, with the untrained drafter in `config.out`.

    Raises:
        TrainError: data or state cannot be used, or the loss is not finite.
        CheckpointError: target or drafter cannot be used.
    """
    if config.out.exists() and not config.out.is_dir():
        raise TrainError(f"{config.out} is a file, but must be a folder.")
    if dry_run and (config.out / STATE_DIR / "state.pt").exists():
        raise TrainError(f"{config.out} holds a trained drafter: give the dry run another --out.")
    with ranks(config.device) as device:
        trainer = build(config, device)
        if dry_run:
            trainer.keep()
        elif resume:
            trainer.restore()
        else:
            trainer.forget()
        if not dry_run:
            trainer.run(progress)
        del trainer  # it must not outlive `ranks`
    return config.out


def build(config: TrainConfig, device: torch.device) -> Trainer:
    """Return a trainer of one drafter, before the first update."""
    run_context = prepare(config, device, shortest=config.block_size + 2)
    drafter = new_drafter(config, run_context)
    teacher = make_teacher(config, run_context, drafter.t2d, device)
    if config.init is None:  # the last state learns to match the target's
        drafter.lm_head.weight.data.copy_(folded_head(config.target, drafter.t2d))
    drafter = drafter.to(device, torch.float32).train()
    # Flex attention has no backward pass on a CPU.
    learner = SpecBlockLearner(drafter, config, "flex" if device.type == "cuda" else "sdpa")
    _describe(config, run_context, learner, device)
    sequences, facts = sequences_of(run_context, teacher, device), run_context.facts
    return Trainer(config, learner, teacher, run_context.windows, sequences, device, facts)


@dataclass(frozen=True)
class RunContext:
    """Target and data of a run.

    texts: all of them; `windows` has the first ones, `held_out` the others, cut to a window.
    counts: [V] int64, how often each target id is a label.
    facts: written beside each checkpoint.
    """

    target: TargetInfo
    texts: list[Text]
    windows: PackedDataset
    held_out: list[Text]
    counts: Tensor
    facts: dict[str, Any]


def prepare(config: RunConfig, device: torch.device, shortest: int) -> RunContext:
    """Read and check everything but weights; raises `TrainError` or `CheckpointError`.

    shortest: see `PackedDataset`.
    """
    target = describe_target(config.target, config.target_name, config.layer_ids)
    texts = load_texts(config.data, target.vocab_size)
    if config.hold_out >= len(texts):
        raise TrainError(
            f"hold_out is {config.hold_out}, but {config.data} has only {len(texts)} sequences."
        )
    split = len(texts) - config.hold_out
    windows = PackedDataset(texts[:split], config.length, shortest, config.pack)
    held_out = [
        Text(text.tokens[: config.length], text.loss_mask[: config.length])
        for text in texts[split:]
    ]
    facts = provenance.provenance() | {
        "options": config.model_dump(mode="json"),
        "data": windows.fingerprint,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": world()[1],
    }
    counts = token_counts(texts[:split], target.vocab_size)
    return RunContext(target, texts, windows, held_out, counts, facts)


def make_teacher(
    config: RunConfig, run_context: RunContext, t2d: Tensor, device: torch.device
) -> Teacher:
    """Return the frozen target, or its features on disk. t2d [V] bool: the draft vocabulary."""
    draft_ids, layer_ids = t2d.nonzero()[:, 0].to(device), run_context.target.layer_ids
    assert layer_ids is not None  # `describe_target` sets them
    if config.features is None:
        target = load_target(config.target, config.precision, device)
        return OnlineTeacher(target, layer_ids, draft_ids)
    return StoredTeacher(
        config.features,
        config.target,
        draft_ids,
        device,
        torch.bfloat16 if config.precision == "bf16" else torch.float32,
        layer_ids=layer_ids,
        length=config.length,
        data=feature_store.fingerprint(text.tokens for text in run_context.texts),
    )


def sequences_of(
    run_context: RunContext, teacher: Teacher, device: torch.device
) -> list[EvalSequence]:
    """Return the held-out texts as sequences to draft along, on the first rank only."""
    if world()[0] != 0:
        return []
    first = len(run_context.windows.texts)
    sequences = []
    for number, text in enumerate(run_context.held_out, first):
        if not text.loss_mask.any():
            continue  # its prompt fills the window
        batch = Batch.of(text.tokens.long()[None], text.loss_mask[None], number).to(device)
        sequences.append(EvalSequence.of(teacher, batch, prompt_of(text)))
    return sequences


def prompt_of(text: Text) -> int:
    """Return the number of prompt tokens: those before the target's first, or a share."""
    first = int(text.loss_mask.byte().argmax())
    return first if first else max(1, len(text.tokens) // PROMPT_SHARE)


def new_drafter(config: TrainConfig, run_context: RunContext) -> SpecBlockModel:
    """Return the drafter to start from: `config.init`, or new weights."""
    target = run_context.target
    if config.init is not None:
        drafter = checkpoint.load(config.init)
        check_target(config.init, drafter.config.target, config.target, target)
        return drafter
    return untrained.init(
        config.target,
        draft_vocab_size=min(config.draft_vocab_size, target.vocab_size),
        layer_ids=target.layer_ids,
        token_counts=run_context.counts,
        target_name=config.target_name,
        seed=config.seed,
        **config.model_dump(include=_SHAPE),
    )


def folded_head(target: Path, t2d: Tensor) -> Tensor:
    """Return the target's LM head over the draft vocabulary times its final norm: [Vd, Ht] fp32."""
    rows = target_rows.head_rows(target, t2d.nonzero()[:, 0])
    return rows.float() * target_rows.final_norm(target).float()


def _describe(
    config: TrainConfig, run_context: RunContext, learner: SpecBlockLearner, device: torch.device
) -> None:
    if world()[0] != 0:
        return
    windows, counts = run_context.windows, run_context.counts
    parameters = sum(weight.numel() for weight in learner.parameters())
    named = int(counts[learner.drafter.t2d.cpu()].sum())
    tqdm.write(
        f"{len(windows):,} windows of {config.length} columns, {windows.num_tokens:,} tokens "
        f"({windows.num_tokens / (len(windows) * config.length):.0%} full); "
        f"{config.num_steps(len(windows)):,} updates of {config.batch} windows\n"
        f"drafter of {parameters / 1e6:.1f} M parameters; its {len(learner.drafter.d2t):,} of "
        f"{len(counts):,} tokens cover {named / max(1, int(counts.sum())):.1%} of what is to be "
        "predicted"
    )
    if sentence := slow_arithmetic(config, device):
        tqdm.write(sentence)
