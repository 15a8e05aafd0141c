"""What the objective has to know of the rest of a batch, on other ranks and in other micro-batches:
nothing but how many rows are counted there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def mean_over_ranks(total: Tensor, count: Tensor, floor: float = 0.0) -> Tensor:
    """This rank's share of means over all ranks' rows, to be averaged over the ranks.

    With it, n ranks compute the gradient that one rank would for all of their rows, though
    each counts another number of rows.

    Args:
        total: [...] fp32 with gradient, sums over this rank's rows.
        count: [...] this rank's rows, in any dtype.
        floor: every divisor is at least this share of the largest of them.

    Returns:
        [...] fp32; 0 where nobody counted a row.
    """
    ranks = world()[1]
    count = count.to(torch.float32, copy=True)
    if ranks > 1:
        dist.all_reduce(count)
    return total * ranks / divisor(count, floor)


def divisor(count: Tensor, floor: float) -> Tensor:
    """What sums over `count` [...] fp32 rows are divided by: at least `floor` of the most rows."""
    return count.clamp(min=1).maximum(floor * count.max())


class BatchCounts:
    """Rows that the means of one update are taken over, when its batch comes in micro-batches.

    Which rows count depends on the learner's own choices (eq. 5), so that nobody knows before the
    forward of the last micro-batch what the first one's sums are to be divided by. Hence two
    passes: all micro-batches are counted, without a gradient, then learned. That is exact, and one
    more forward; the others would be gradients kept apart for every block and position, or the
    activations of the whole batch.

    Args:
        rounds: micro-batches of each rank.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds, self._whole = rounds, False
        self.totals: list[Tensor] = []
        self._next = 0

    def start(self) -> None:
        """Before each forward: its means come in the same order as every other one's."""
        self._next = 0

    def finish(self) -> None:
        """All of this rank's micro-batches are counted; every rank has to call this."""
        if world()[1] > 1:
            for total in self.totals:
                dist.all_reduce(total)
        self._whole = True

    def mean(self, total: Tensor, count: Tensor, floor: float) -> Tensor:
        """As `mean_over_ranks`, of a micro-batch: to be averaged over all of them and the ranks.
        While counting what it gives is of no use."""
        number, self._next = self._next, self._next + 1
        if self._whole:
            return total * world()[1] * self.rounds / divisor(self.totals[number], floor)
        if number == len(self.totals):
            self.totals.append(torch.zeros_like(count, dtype=torch.float32))
        self.totals[number] += count
        return total
