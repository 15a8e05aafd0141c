"""Agreement between the ranks of a tensor-parallel engine."""

from __future__ import annotations

from torch import distributed
from torch.distributed import ProcessGroup
from vllm.distributed.parallel_state import get_tp_group


class Ranks:
    """A group of processes; all make the same calls in the same order, and wait for each other.

    group: None: the ranks that share this engine's target.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = get_tp_group().cpu_group if group is None else group
        self.first = distributed.get_rank(self.group) == 0

    def gather(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in their order."""
        numbers = [0] * self.group.size()
        distributed.all_gather_object(numbers, number, self.group)
        return numbers
