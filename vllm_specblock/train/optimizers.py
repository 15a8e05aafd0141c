"""Optimisers and learning rate of a drafter: AdamW as in the paper, or with Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train.config import RunConfig, TrainError

BETAS = (0.9, 0.999)
_MOMENTUM = 0.95
_NOT_HIDDEN = ("head", "embed", "queries")
"""Name parts of weights with rows or columns for tokens, classes or positions."""


def make_optimizers(
    weights: Iterable[tuple[str, nn.Parameter]], config: RunConfig
) -> list[torch.optim.Optimizer]:
    """Return optimisers for all trainable `weights`.

    AdamW for all, or Muon for matrices between hidden states and AdamW for norms, embeddings and
    heads. Muon's updates are scaled to AdamW's usual size, so both use one learning rate.

    Raises:
        TrainError: Muon with sharded weights: it needs whole matrices.
    """
    lr, weight_decay = config.lr, config.weight_decay
    muon = config.optimizer == "muon"
    if muon and config.parallel == "shard":
        raise TrainError(
            "optimizer muon needs whole matrices: train with parallel replicate, or with adamw."
        )
    inner: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in weights:
        hidden = weight.dim() == 2 and not any(word in name for word in _NOT_HIDDEN)
        if weight.requires_grad:
            (inner if muon and hidden else rest).append(weight)
    found: list[torch.optim.Optimizer] = []
    if inner:
        found.append(
            torch.optim.Muon(
                inner, lr, weight_decay, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw"
            )
        )
    if rest:
        found.append(torch.optim.AdamW(rest, lr, BETAS, weight_decay=weight_decay, fused=True))
    return found


def slow_arithmetic(config: RunConfig, device: torch.device) -> str | None:
    """Return a warning if bfloat16 products would run on a processor without them, else None."""
    if device.type != "cpu" or PackedLinear.packs():
        return None
    changes = ["precision fp32"] if config.precision == "bf16" else []
    if config.optimizer == "muon":  # Muon's products are in bfloat16 at any precision
        changes.append("optimizer adamw")
    if not changes:
        return None
    return (
        "This processor has no products in bfloat16, and updates will take many times as long as "
        f"in float32: take {' and '.join(changes)}."
    )


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Return the rate of update `step` (0-based) of `steps`: linear warm-up, then a cosine to 0."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
