"""Train state of one learner, replicated (DDP) or sharded (FSDP2); and a run's state on disk."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.distributed import BatchCounts, world
from vllm_specblock.train.learner import Learner, TrainBatch
from vllm_specblock.train.metrics_log import MetricsLog
from vllm_specblock.train.optimizers import make_optimizer, set_rate


class TrainState:
    """A learner with its optimiser and its log, spread over the ranks."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        self.learner = self._whole = learner
        self._module: nn.Module = learner
        many = world()[1] > 1
        if many and config.parallel == "shard":
            # Judging and saving need whole weights on one rank.
            self._whole = copy.deepcopy(learner)
            fully_shard(learner)  # in place
        elif many:
            # The rank head rests at first, and a block may be out of every row's reach.
            self._module = DistributedDataParallel(learner, find_unused_parameters=True)
        named = list(learner.named_parameters())  # after sharding
        self._parameters = [parameter for _, parameter in named]
        self.optimizer = make_optimizer(named, config)
        self.metrics_log = MetricsLog()
        self.best_tau = 0.0
        self.lost = 0  # updates in a row whose gradient was not finite

    @torch.no_grad()
    def count(self, train_batch: TrainBatch, counts: BatchCounts) -> None:
        """Add the rows of one micro-batch to those of the batch."""
        counts.start()
        with self._exchange(False):
            self._module(replace(train_batch, counts=counts))

    def learn(
        self, train_batch: TrainBatch, counts: BatchCounts | None, more_to_come: bool
    ) -> None:
        """Add up the gradients of one micro-batch; `counts`: of the whole batch of several."""
        share = 1.0
        if counts is not None:
            share = 1 / counts.rounds
            train_batch = replace(train_batch, counts=counts)
            counts.start()
        with self._exchange(not more_to_come):
            outcome = self._module(train_batch)
            (outcome.loss * share).backward()
        self.metrics_log.add(outcome)

    @contextlib.contextmanager
    def _exchange(self, gradients: bool) -> Iterator[None]:
        """Around a forward and backward: whether ranks exchange gradients after it."""
        if isinstance(self._module, DistributedDataParallel) and not gradients:
            with self._module.no_sync():
                yield
            return
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(gradients)
        yield

    def step(self, rate: float, clip: float) -> None:
        """Update the weights, unless the gradient is not finite: then count that."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = bool(norm.isfinite())
        if finite:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        self.lost = 0 if finite else self.lost + 1
        self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> Learner:
        """The learner with whole weights, current on rank 0; every rank has to call this."""
        if self._whole is not self.learner:
            self._whole.load_state_dict(_gathered(self.learner.state_dict()))
        return self._whole

    def state(self) -> dict[str, Any]:
        """Whole state on the CPU, for any number of ranks; every rank has to call this.

        Not torch.distributed.checkpoint: a parameter has no moments before its first update.
        """
        optimizer = self.optimizer.state_dict()
        moments = {number: _gathered(of) for number, of in optimizer["state"].items()}
        return {
            "model": _gathered(self.learner.state_dict()),
            "optimizer": optimizer | {"state": moments},
            "journal": self.metrics_log.state(),
            "best_tau": self.best_tau,
            "lost": self.lost,
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state` returned, on every rank of any number of ranks."""
        model = self.learner.state_dict()
        self.learner.load_state_dict(
            {name: _spread_like(model[name], value) for name, value in state["model"].items()}
        )
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {
            number: {name: _spread_like(parameters[number], value) for name, value in of.items()}
            for number, of in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict(state["optimizer"] | {"state": moments})
        self.metrics_log.load_state(state["journal"], device)
        self.best_tau, self.lost = state["best_tau"], state["lost"]


def _gathered(tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in tensors.items()
    }


def _spread_like(example: Tensor, value: Tensor) -> Tensor:
    """`value` sharded as `example` is, unless it is of another shape, such as a count of steps."""
    if not isinstance(example, DTensor) or example.shape != value.shape:
        return value
    return distribute_tensor(value.to(example.device), example.device_mesh, example.placements)


def read_state(
    path: Path, config: RunConfig, data: str, learners: Collection[str]
) -> dict[str, Any]:
    """Read what `Trainer.save` wrote to `path`; raises `TrainError` where it is no such state, or
    belongs to other options, data (a fingerprint) or learners."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainError(f"{path} is no training state: {error}.") from None
    if not isinstance(state, dict) or "options" not in state:
        raise TrainError(f"{path} is no training state of this version; give another --out.")
    before = json.loads(state["options"])
    for name, value in config.must_match().items():
        if (then := before.get(name)) != value:
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
