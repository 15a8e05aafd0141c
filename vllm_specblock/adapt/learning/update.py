"""Updates of the training copy on recorded rows [SpecBlock, eq. 7]."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm_specblock.adapt.policy.actions import parameters
from vllm_specblock.adapt.policy.interface import EVERY, Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.attention import FirstBlock
from vllm_specblock.train.config import Recipe
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.optimizers import BETAS
from vllm_specblock.train.specblock import SpecBlockLearner

RATE = 0.0576
"""Learning rate times the drafter's width: 3e-4 at 192, 1e-4 at 576. AdamW's steps have one size in
any matrix, and add up over its inputs."""

HEADS_RATE = 3.0
"""Factor of the heads' learning rate."""

CLIP = 0.5
"""Maximum norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class AdaptationConfig:
    """Settings of updates.

    Attributes:
        lr: constant rate of a full update; None: by the drafter's width.
        anchor: λ of the KL to θ_0 (the paper: 0.01; rehearsal replaces it by default).
        num_blocks: M, of serving.
        memory: size of the book, MiB.
        every: new records of an update.
    """

    lr: float | None = None
    anchor: float = 0.0
    num_blocks: int = 2
    memory: float = 512
    every: int = EVERY
    seed: int = 0


class Updater:
    """Trains θ_train by AdamW without weight decay, at a constant rate.

    Moments outlive an update; each parameter counts only updates that trained it.

    Attributes:
        drafter: θ_train, float32.
        rate: learning rate of a full update.
        steps: batches so far.
    """

    def __init__(
        self,
        drafter: SpecBlockModel,
        config: AdaptationConfig | None = None,
        rejected_only: bool = False,
    ) -> None:
        config = config or AdaptationConfig()
        self.drafter = drafter
        self.rate = RATE / drafter.config.hidden_size if config.lr is None else config.lr
        # In a new domain few rows reach later positions, and their mean is noisy.
        recipe = Recipe(num_blocks=config.num_blocks, rank_from=0, loss_floor=1.0)
        self.learner = SpecBlockLearner(drafter, recipe, rejected_only=rejected_only)
        self.anchor = config.anchor
        self.origin = copy.deepcopy(drafter).requires_grad_(False) if self.anchor else None
        self.steps = 0
        self.forget()

    def forget(self) -> None:
        """Start a new optimiser, after θ_train was set to another version."""
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=self.rate, betas=BETAS, weight_decay=0.0
        )

    def update(self, action: Action, train_batches: Sequence[TrainBatch]) -> list[float]:
        """Train on each batch once; return their losses before it, nats.

        Batches with a loss or gradient that is not finite are skipped.
        """
        learning = list(parameters(self.drafter, action).values())
        self.drafter.requires_grad_(False)  # heads need no backward pass of the trunk
        for value in learning:
            value.requires_grad_(True)
        rate = self.rate * (HEADS_RATE if action is Action.HEADS else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = (self._learn(train_batch, learning) for train_batch in train_batches)
        learned = [loss for loss in losses if loss is not None]
        self.steps += len(learned)
        return learned

    def _learn(self, train_batch: TrainBatch, learning: list[nn.Parameter]) -> float | None:
        """Return the batch's loss; None: skipped, since it or its gradient was not finite."""
        loss = self.learner(train_batch).loss
        if self.origin is not None:
            loss = loss + self.anchor * anchor(self.drafter, self.origin, train_batch)
        if not loss.requires_grad or not torch.isfinite(loss):
            return None
        loss.backward()
        norm = nn.utils.clip_grad_norm_(learning, CLIP)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()) if torch.isfinite(norm) else None


def anchor(drafter: SpecBlockModel, origin: SpecBlockModel, train_batch: TrainBatch) -> Tensor:
    """KL(p_θ ‖ p_θ0) of block 1's K positions, the paper's guard against drift (SpecBlock §3.4).

    A mean over rows whose root the target drew itself: [] fp32, nats; 0 without such a row.
    """
    batch = train_batch.batch
    row = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    row = row.expand(len(batch.tokens), -1)
    live = batch.at(batch.loss_mask, row, row + 1, False).flatten()

    def log_probs(model: SpecBlockModel) -> Tensor:
        hidden = model(
            model.condition(train_batch.target_outputs.hidden[:, :-1].flatten(0, 1)),
            train_batch.embed(batch.tokens[:, 1:].clamp(min=0).flatten()),
            (batch.position[:, :-1] + 1).flatten(),
            FirstBlock(batch, model.config.block_size),
        )
        return model.lm_head(model.norm(hidden[live])).float().log_softmax(-1)

    own = log_probs(drafter)
    with torch.no_grad():
        before = log_probs(origin)
    return (own.exp() * (own - before)).sum() / max(own[..., 0].numel(), 1)
