"""Copies of slabs in host memory."""

from __future__ import annotations

import torch

# By name: tests put a device in their place that does everything late.
from torch.cuda import Event, Stream, stream

from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors


class HostSlabs:
    """Slabs in host memory, read in place or from the copies `rows`.

    Attributes:
        sums: three of [G], `missed`, `steps` and `committed` of the last request in each slab.
    """

    def __init__(self, tensors: SlabTensors, rows: SlabTensors | None = None) -> None:
        self.tensors, self.rows = tensors, tensors if rows is None else rows
        self._totals = (tensors.missed, tensors.steps, tensors.committed)
        pinned, slabs = self.rows.token.is_pinned(), len(tensors.begin)
        self.sums = tuple(
            torch.zeros(slabs, dtype=total.dtype, device="cpu", pin_memory=pinned)
            for total in self._totals
        )
        self._begin = self.rows.begin.numpy()  # a host view
        self._end = self.rows.end.numpy()  # a host view

    def before_step(self) -> None:
        """Called before a step."""

    def give(self, slab: int) -> None:
        """Record that a slab belongs to another request from the next step on."""

    def most_rows(self, slab: int, reach: int) -> int:
        """Return the maximum rows in a slab now; `reach`: rows that a decode step may add."""
        return int(self._end[slab] - self._begin[slab])  # a host number

    def send(self, slab: int, slot: int) -> None:
        """Copy a slab, and the sums of the request in `slot` that left it, to the host."""
        for sent, total in zip(self.sums, self._totals):
            sent[slab].copy_(total[slot], non_blocking=True)

    def is_here(self, slab: int) -> bool:
        """Return whether a sent slab and its sums can be read."""
        return True


class PinnedSlabs(HostSlabs):
    """Slabs on a GPU, copied to pinned memory on a side stream.

    A slab's row count arrives some steps late; the rows that these may add are counted in.
    """

    def __init__(self, tensors: SlabTensors) -> None:
        slabs, width, hidden = tensors.last.shape
        dtype = tensors.last.dtype
        super().__init__(
            tensors, SlabTensors.empty(slabs, width, hidden, 0, dtype, "cpu", pin_memory=True)
        )
        self._beside = Stream()
        # Steps are numbered; a copy requested before a step covers the steps before it.
        self._step = self._asked_at = self._known = 0
        self._asked = Event()
        self._asked.record()
        self._given, self._here = [0] * slabs, [Event() for _ in range(slabs)]

    def before_step(self) -> None:
        self._step += 1
        if self._asked.query():
            self._known, self._asked_at = self._asked_at, self._step
            self._copy_extents()
            self._asked.record()

    def give(self, slab: int) -> None:
        self._given[slab] = self._step

    def most_rows(self, slab: int, reach: int) -> int:
        given, rows, since = self._given[slab], 0, self._step - self._known
        if self._known > given:
            rows = super().most_rows(slab, reach)
        else:
            since = self._step - given
        # Maximum recorded rows of a prompt.
        return max(rows, PROMPT_ROWS) + since * reach

    def send(self, slab: int, slot: int) -> None:
        super().send(slab, slot)
        self._copy_extents()
        left = Event()
        left.record()
        self._beside.wait_event(left)
        with stream(self._beside):
            for name in ("states", "last", "token"):
                here, there = getattr(self.rows, name), getattr(self.tensors, name)
                here[slab].copy_(there[slab], non_blocking=True)
            self._here[slab].record()

    def is_here(self, slab: int) -> bool:
        return self._here[slab].query()

    def _copy_extents(self) -> None:
        self.rows.begin.copy_(self.tensors.begin, non_blocking=True)
        self.rows.end.copy_(self.tensors.end, non_blocking=True)
