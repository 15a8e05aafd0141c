"""Optimisers and learning rate of a drafter: AdamW as in the paper, or Muon beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train.config import RunConfig, TrainError

BETAS = (0.9, 0.999)
_MOMENTUM = 0.95
_adamw = partial(torch.optim.AdamW, betas=BETAS, fused=True)
_NOT_HIDDEN = ("head", "embed", "queries")
"""In the names of weights whose rows or columns stand for tokens, classes or positions."""

Named = tuple[str, nn.Parameter]


def make_optimizer(weights: Sequence[Named], config: RunConfig) -> torch.optim.Optimizer:
    """Return an optimiser of all `weights` that learn.

    Raises:
        TrainError: Muon with sharded weights: it needs whole matrices.
    """
    learning = [(name, weight) for name, weight in weights if weight.requires_grad]
    if config.optimizer == "muon":
        if config.parallel == "shard":
            raise TrainError(
                "optimizer muon needs whole matrices: train with parallel replicate, or with adamw."
            )
        return MuonWithAdamW(learning, config.lr, config.weight_decay)
    parameters = [weight for _, weight in learning]
    return _adamw(parameters, lr=config.lr, weight_decay=config.weight_decay)


def slow_arithmetic(config: RunConfig, device: torch.device) -> str | None:
    """A warning where a run would multiply in bfloat16 on a processor without it; else None."""
    if device.type != "cpu" or PackedLinear.packs():
        return None
    changes = ["precision fp32"] if config.precision == "bf16" else []
    if config.optimizer == "muon":  # its own products are in bfloat16 at any precision
        changes.append("optimizer adamw")
    if not changes:
        return None
    return (
        "This processor has no products in bfloat16, and updates will take many times as long as "
        f"in float32: take {' and '.join(changes)}."
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(config: RunConfig, step: int, steps: int) -> float:
    """Rate of update `step` (0-based) of `steps`: linear warm-up, then a cosine to 0."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices between hidden states, AdamW for all else, as one optimiser.

    Muon's updates are scaled to AdamW's usual size, so one learning rate serves both. Norms,
    embeddings and heads (whose rows are tokens or classes) are AdamW's.
    """

    def __init__(self, weights: Sequence[Named], lr: float, weight_decay: float) -> None:
        inner = [weight for name, weight in weights if _is_hidden(name, weight)]
        rest = [weight for name, weight in weights if not _is_hidden(name, weight)]
        muon = partial(torch.optim.Muon, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [
            kind(part, lr=lr, weight_decay=weight_decay)
            for kind, part in ((muon, inner), (_adamw, rest))
            if part
        ]
        super().__init__([*inner, *rest], {})
        # Groups and state are those of the parts, so that rates and saving reach both.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self._share_state()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """One update of every weight that has a gradient."""
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, with new groups and a new state."""
        super().__setstate__(state)
        for part, group in zip(self._parts, self.param_groups):
            part.param_groups = [group]
        self._share_state()

    def _share_state(self) -> None:
        for part in self._parts:
            part.state = self.state


def _is_hidden(name: str, weight: nn.Parameter) -> bool:
    """Whether a weight is a matrix between hidden states."""
    return weight.dim() == 2 and not any(word in name for word in _NOT_HIDDEN)
