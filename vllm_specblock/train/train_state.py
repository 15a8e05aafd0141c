"""Train state of one learner: optimiser, metrics, best result so far; and a run's state on disk."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.distributed import BatchCounts
from vllm_specblock.train.distributed_model import DistributedModel
from vllm_specblock.train.learner import Learner, TrainBatch
from vllm_specblock.train.metrics_log import MetricsLog
from vllm_specblock.train.optimizers import make_optimizer, set_rate


class TrainState:
    """A learner with its optimiser and its log, spread over the ranks."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        self.dist_model = DistributedModel(learner, config.parallel)
        self.optimizer = make_optimizer(self.dist_model.named_parameters, learner.rate_of, config)
        self.metrics_log = MetricsLog()
        self.best_tau = 0.0
        self.lost = 0  # updates in a row whose gradient was not finite

    @torch.no_grad()
    def count(self, train_batch: TrainBatch, counts: BatchCounts) -> None:
        """Add the rows of one micro-batch to those of the batch."""
        counts.start()
        with self.dist_model.adding_up(True):
            self.dist_model.module(replace(train_batch, counts=counts))

    def learn(
        self, train_batch: TrainBatch, counts: BatchCounts | None, more_to_come: bool
    ) -> None:
        """Add up the gradients of one micro-batch.

        counts: of the whole batch, when there are several.
        """
        share = 1.0
        if counts is not None:
            share = 1 / counts.rounds
            train_batch = replace(train_batch, counts=counts)
            counts.start()
        with self.dist_model.adding_up(more_to_come):
            outcome = self.dist_model.module(train_batch)
            (outcome.loss * share).backward()
        self.metrics_log.add(outcome)

    def step(self, rate: float, clip: float) -> None:
        """Update the weights, unless the gradient is not finite: then count that."""
        norm = torch.nn.utils.clip_grad_norm_(self.dist_model.parameters, clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = bool(norm.isfinite())
        if finite:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        self.lost = 0 if finite else self.lost + 1
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {
            **self.dist_model.state(self.optimizer),
            "journal": self.metrics_log.state(),
            "best_tau": self.best_tau,
            "lost": self.lost,
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        self.dist_model.load_state(self.optimizer, state)
        self.metrics_log.load_state(state["journal"], device)
        self.best_tau, self.lost = state["best_tau"], state["lost"]


def read_state(
    path: Path, config: RunConfig, data: str, learners: Collection[str]
) -> dict[str, Any]:
    """What `Trainer.save` wrote to `path`, for the run that it was written by.

    Args:
        config: of the run that goes on.
        data: the fingerprint of what it trains on.
        learners: their names.

    Raises:
        TrainError: it is no such state, or belongs to other options, data or learners.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainError(f"{path} is no training state: {error}.") from None
    if not isinstance(state, dict) or "options" not in state:
        raise TrainError(f"{path} is no training state of this version; give another --out.")
    before, now = json.loads(state["options"]), config.must_match()
    for name, value in now.items():
        # An option that is newer than the state had no other value than its default.
        then = before.get(name, type(config).model_fields[name].default)
        if then != value:
            raise TrainError(
                f"{path} was trained with {name} = {then}, not {value}; "
                "give the same options, another --out, or --no-resume to start anew."
            )
    if state["data"] != data:
        raise TrainError(
            f"{path} was trained on other data than {config.data}; give the same data, "
            "another --out, or --no-resume to start anew."
        )
    if state["students"].keys() != set(learners):
        raise TrainError(
            f"{path} holds {', '.join(state['students'])}, not {', '.join(learners)}; "
            "give another --out, or --no-resume to start anew."
        )
    return state
