"""The optimisers a drafter learns with: AdamW as in the paper, or Muon beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_specblock.train.config import RunConfig, TrainError

BETAS = (0.9, 0.999)
_MOMENTUM = 0.95


def make_optimizer(module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """An optimiser of all of `module`'s weights that learn.

    Raises:
        TrainError: Muon with sharded weights: it needs whole matrices.
    """
    if config.optimizer == "muon":
        if config.parallel == "shard":
            raise TrainError(
                "optimizer muon needs whole matrices: train with parallel replicate, or with adamw."
            )
        return MuonWithAdamW(module, config.lr, config.weight_decay)
    return torch.optim.AdamW(
        [weight for weight in module.parameters() if weight.requires_grad],
        lr=config.lr,
        betas=BETAS,
        weight_decay=config.weight_decay,
        fused=True,
    )


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices between hidden states, AdamW for all else, as one optimiser.

    Muon's updates are scaled to AdamW's usual size, so one learning rate serves both. Norms,
    embeddings and heads (whose rows are tokens or classes) are AdamW's.

    Args:
        module: whose weights learn.
        lr: of both. weight_decay: decoupled, of both.
    """

    def __init__(self, module: nn.Module, lr: float, weight_decay: float):
        inner, rest = _split(module)
        self._parts: list[torch.optim.Optimizer] = []
        if inner:
            self._parts.append(
                torch.optim.Muon(
                    inner,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=_MOMENTUM,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            self._parts.append(
                torch.optim.AdamW(rest, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=True)
            )
        super().__init__([*inner, *rest], {})
        # Groups and state are those of the parts, so that rates and saving reach both.
        self.param_groups = [part.param_groups[0] for part in self._parts]
        self._share_state()

    def step(self, closure: None = None) -> None:
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


def _split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices between hidden states, the rest) of the weights that learn."""
    inner: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            hidden = weight.dim() == 2 and not any(word in name for word in _NOT_HIDDEN)
            (inner if hidden else rest).append(weight)
    return inner, rest


_NOT_HIDDEN = ("head", "embed", "queries")
"""In the names of weights whose rows or columns stand for tokens, classes or positions."""
