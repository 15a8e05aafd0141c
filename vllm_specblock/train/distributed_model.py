"""Distributed training: device of a rank, and a learner spread over ranks.

torchrun says how many ranks there are. A learner is one module with one forward per batch, so
torch's own wrappers take it as it is: DDP replicates it, FSDP2 shards its weights, gradients and
optimiser state and gathers the weights for the forward.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.distributed import world
from vllm_specblock.train.learner import Learner


@contextlib.contextmanager
def ranks(device: str) -> Iterator[torch.device]:
    """This process's device, with the other ranks joined for as long as the context lasts.

    Nothing that was spread over the ranks may outlive the context: it keeps the ranks' connections,
    and gloo's threads with them, alive into the interpreter's exit, which can then hang.

    Raises:
        TrainError: this machine has no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun's way of telling
    if many and device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    usable = usable_device(device)
    if usable.type == "cuda":
        torch.cuda.set_device(usable)
    if many:
        # The others wait while the first rank replays: longer than the default allows.
        backend = "nccl" if usable.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        yield usable
        if many:
            dist.barrier()  # a rank that leaves early can hang gloo's threads at exit
    finally:
        if many:
            gc.collect()  # modules can be part of cycles
            dist.destroy_process_group()


def usable_device(name: str) -> torch.device:
    """The torch device called `name`; raises `TrainError` where this machine has none such."""
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TrainError(f"The device {name} cannot be used: {reason}") from error


class DistributedModel:
    """A learner on all ranks.

    Attributes:
        module: what is called for a loss.
        parameters: what this rank's optimiser steps.
        named_parameters: the same, with the learner's own names for them.
    """

    def __init__(self, learner: Learner, mode: Literal["replicate", "shard"]) -> None:
        self.learner, many = learner, world()[1] > 1
        self._whole = learner
        if many and mode == "shard":
            # What judges and saves needs whole weights on one rank.
            self._whole = copy.deepcopy(learner)
            fully_shard(learner)  # in place
            self.module: nn.Module = learner
        elif many:
            # The rank head rests at first, and a block may be out of every row's reach.
            self.module = DistributedDataParallel(learner, find_unused_parameters=True)
        else:
            self.module = learner
        self.parameters = list(self.module.parameters())
        # DDP puts "module." before every name.
        self.named_parameters = [
            (name.removeprefix("module."), parameter)
            for name, parameter in self.module.named_parameters()
        ]

    @contextlib.contextmanager
    def adding_up(self, more_to_come: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch: ranks exchange gradients only
        after the last."""
        if isinstance(self.module, DistributedDataParallel) and more_to_come:
            with self.module.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(not more_to_come)
        yield

    def whole(self) -> Learner:
        """The learner with whole weights; on ranks other than 0 it may be outdated. Every rank
        has to call this."""
        if self._whole is not self.learner:
            self._whole.load_state_dict(_gathered(self.learner.state_dict()))
        return self._whole

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Weights and optimiser state, whole and on the CPU; every rank has to call this.

        Not torch's distributed checkpoint helpers: they want a state for every parameter, and
        the rank head has none until it learns.
        """
        state = optimizer.state_dict()
        moments = {number: _gathered(of) for number, of in state["state"].items()}
        return {
            "model": _gathered(self.learner.state_dict()),
            "optimizer": state | {"state": moments},
        }

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back what `state` gave, on every rank and however many there are now."""
        model = self.learner.state_dict()
        self.learner.load_state_dict(
            {name: _spread_like(model[name], value) for name, value in state["model"].items()}
        )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            number: {name: _spread_like(parameters[number], value) for name, value in of.items()}
            for number, of in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict(state["optimizer"] | {"state": moments})


def _gathered(tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in tensors.items()
    }


def _spread_like(example: Tensor, value: Tensor) -> Tensor:
    """`value` sharded as `example` is, unless it is another thing, such as a count of steps."""
    if not isinstance(example, DTensor) or example.shape != value.shape:
        return value
    return distribute_tensor(value.to(example.device), example.device_mesh, example.placements)
