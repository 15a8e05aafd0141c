"""Ranks of a training run (under torchrun), and means over the rows of all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_specblock.train.config import TrainError


def world() -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum `value` over the ranks in place; every rank must call this."""
    if world()[1] > 1:
        dist.all_reduce(value)
    return value


@contextlib.contextmanager
def ranks(device: str) -> Iterator[torch.device]:
    """This process's device, with the other ranks joined inside the context. An object that is
    spread over the ranks and outlives it can hang gloo's threads at exit."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if many and device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    usable = usable_device(device)
    if usable.type == "cuda":
        torch.cuda.set_device(usable)
    if many:
        # The other ranks wait while the first one replays, longer than the default.
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
    """Return the torch device `name`; raises `TrainError` if this machine has no such device."""
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TrainError(f"The device {name} cannot be used: {reason}") from error


class BatchCounts:
    """Means over the rows of one update, of all ranks and of its `rounds` micro-batches.

    Which rows count depends on the drafter's choices (eq. 5), so the divisor is known only after
    the last micro-batch. Hence two passes: count all micro-batches without a gradient, then train.
    A batch of one round needs no counting.
    """

    def __init__(self, rounds: int = 1) -> None:
        self.rounds, self._counted = rounds, rounds == 1
        self.totals: dict[str, Tensor] = {}

    def finish(self) -> None:
        """End the counting; every rank must call this."""
        for total in self.totals.values():
            sum_over_ranks(total)
        self._counted = True

    def mean(self, total: Tensor, count: Tensor, floor: float = 0.0, name: str = "draft") -> Tensor:
        """Return this micro-batch's share of means over all rows: [...] fp32, 0 if no row was
        counted. Averaged over ranks and rounds, it is the mean that one rank would compute in one
        round. Valid after `finish`.

        Args:
            total: [...] fp32 with gradient, sums over this rank's rows.
            count: [...] number of these rows, any dtype.
            floor: minimum of the divisors, as a share of the largest.
            name: of the mean, one of each name in a forward.
        """
        if self.rounds == 1:
            rows = sum_over_ranks(count.to(torch.float32, copy=True))
        elif self._counted:
            rows = self.totals[name]
        else:
            self.totals[name] = count.float() + self.totals.get(name, 0)
            return total
        divisor = rows.clamp(min=1).maximum(floor * rows.max())
        return total * world()[1] * self.rounds / divisor
