"""Optimisers and learning rate of a drafter: AdamW as in the paper, or Muon beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def make_optimizer(
    weights: Sequence[Named], rate_of: Callable[[str], float], config: RunConfig
) -> torch.optim.Optimizer:
    """An optimiser of all `weights` that learn, in groups by `rate_of` (name -> multiple of the
    learning rate).

    Raises:
        TrainError: Muon with sharded weights: it needs whole matrices.
    """
    learning = [(name, weight) for name, weight in weights if weight.requires_grad]
    if config.optimizer == "muon":
        if config.parallel == "shard":
            raise TrainError(
                "optimizer muon needs whole matrices: train with parallel replicate, or with adamw."
            )
        return MuonWithAdamW(learning, rate_of, config.lr, config.weight_decay)
    return _adamw(_groups(learning, rate_of), lr=config.lr, weight_decay=config.weight_decay)


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
    """Set the learning rate, in each group times its own multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)  # absent in older states


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

    def __init__(
        self,
        weights: Sequence[Named],
        rate_of: Callable[[str], float],
        lr: float,
        weight_decay: float,
    ) -> None:
        inner = [named for named in weights if _is_hidden(*named)]
        rest = [named for named in weights if not _is_hidden(*named)]
        muon = partial(torch.optim.Muon, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [
            kind(_groups(part, rate_of), lr=lr, weight_decay=weight_decay)
            for kind, part in ((muon, inner), (_adamw, rest))
            if part
        ]
        super().__init__([weight for _, weight in [*inner, *rest]], {})
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
        first = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            first += count
        self._share_state()

    def _share_state(self) -> None:
        for part in self._parts:
            part.state = self.state


def _groups(weights: Sequence[Named], rate_of: Callable[[str], float]) -> list[dict[str, Any]]:
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in weights:
        groups.setdefault(rate_of(name), []).append(weight)
    return [{"params": params, "times": times} for times, params in groups.items()]


def _is_hidden(name: str, weight: nn.Parameter) -> bool:
    """Whether a weight is a matrix between hidden states."""
    return weight.dim() == 2 and not any(word in name for word in _NOT_HIDDEN)
