"""Agreement between the ranks of a tensor-parallel engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from vllm.distributed.parallel_state import get_tp_group


class Ranks:
    """A group of processes; all make the same calls in the same order, and wait for each other.

    Args:
        group: a group for tensors in host memory.

    Attributes:
        first: whether this process is the group's first.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.first = distributed.get_rank(group) == 0

    def alike(self, number: int) -> bool:
        """Return whether all ranks pass the same number, |number| < 2^63."""
        both = torch.tensor([number, -number], device="cpu")
        distributed.all_reduce(both, distributed.ReduceOp.MIN, self._group)
        low: int
        high: int
        low, high = both.tolist()  # a host tensor
        return low == -high

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the first rank's numbers; all ranks pass equally many."""
        said = torch.tensor(numbers, device="cpu")
        distributed.broadcast(said, distributed.get_global_rank(self._group, 0), self._group)
        return list(said.tolist())  # a host tensor


def tensor_parallel_ranks() -> Ranks:
    """Return the ranks that share this engine's target."""
    return Ranks(get_tp_group().cpu_group)
