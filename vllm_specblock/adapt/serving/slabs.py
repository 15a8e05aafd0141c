"""Slabs of recorded rows, their copies in host memory, and their requests.

Steps write rows on the device (`triton_kernels/feedback/record_step.py`). Between steps the host
assigns and frees slabs without waiting for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

# By name: tests put a device in their place that does everything late.
from torch.cuda import Event, Stream, stream

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS, ROWS
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.triton_kernels.feedback.record_step import SlabTensors

SLABS = 16
"""Maximum requests recorded at a time; 8 MiB each for an 8B target in 16 bits."""


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

    def before_step(self) -> None:
        """Called before a step."""

    def give(self, slab: int) -> None:
        """Record that a slab belongs to another request from the next step on."""

    def most_rows(self, slab: int, reach: int) -> int:
        """Return the maximum rows in a slab now; `reach`: rows that a decode step may add."""
        return int(self.rows.end[slab] - self.rows.begin[slab])  # a host number

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
        given = self._given[slab]
        rows = super().most_rows(slab, reach) if self._known > given else 0
        since = self._step - max(self._known, given)
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


@dataclass(frozen=True)
class Part:
    """Rows of a request (an id) in a slab: an answer, or a part of it.

    Attributes:
        prompt: tokens of the prompt; the target generated later ones.
        stops: stop tokens; accepted drafts beyond are not part of the answer.
        began: start time of the request, seconds.
    """

    request: str
    slab: int
    prompt: int
    stops: frozenset[int]
    began: float


class Slabs:
    """The slabs of an engine, on its device.

    Args:
        slots: S, request slots.
        hidden, dtype: Ht and dtype of the target's states.
        slabs: G.
        rows: W; must fit a prompt's end and a step.

    Attributes:
        parts: recorded parts, by request slot.
        free: unused slabs.
        copies: host copies; steps call its `before_step`.
    """

    def __init__(
        self,
        slots: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        slabs: int = SLABS,
        rows: int = ROWS,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tensors = SlabTensors.empty(slabs, rows, hidden, slots, dtype, device)
        make = PinnedSlabs if self.tensors.token.is_cuda else HostSlabs
        self.copies = make(self.tensors)
        self.rows = rows
        self.parts: dict[int, Part] = {}
        self.free = list(range(slabs))
        # With the time of the request's last step; None: it continues in another slab.
        self._leaving: deque[tuple[Part, float | None]] = deque()

    def begin(
        self,
        slot: int,
        request: str,
        prompt: int,
        computed: int,
        now: float,
        stops: Iterable[int] = (),
    ) -> bool:
        """Record a new request in a slot, from near its prompt's end on, if a slab is free.

        Args:
            prompt: its tokens; after a preemption with those of its answer.
            computed: cached tokens of these, which no step runs.
            now: seconds.
        """
        if not self.free:
            return False
        part = Part(request, self.free.pop(0), prompt, frozenset(stops), now)
        for total in (self.tensors.missed, self.tensors.steps, self.tensors.committed):
            total[slot].fill_(0)
        for position in (self.tensors.begin, self.tensors.end):
            position[part.slab].fill_(max(computed, prompt - PROMPT_ROWS))
        self._give(slot, part)
        return True

    def crowded(self, slots: Iterable[int], reach: int) -> list[int]:
        """Return the slots whose slabs may have fewer than `reach` free rows."""
        recorded = (slot for slot in slots if slot in self.parts)
        used = {slot: self.copies.most_rows(self.parts[slot].slab, reach) for slot in recorded}
        return [slot for slot, rows in used.items() if 0 < rows > self.rows - reach]

    def move_on(self, slot: int) -> bool:
        """Continue a request in another slab; return whether one was free."""
        if not self.free:
            return False
        left = self.parts[slot]
        part = replace(left, slab=self.free.pop(0))
        self._leave(slot, left, None)
        # Only the device knows its last row.
        newest = self.tensors.end[left.slab]
        for position in (self.tensors.begin, self.tensors.end):
            position[part.slab].copy_(newest)
        self._give(slot, part)
        return True

    def end(self, slot: int, now: float) -> bool:
        """Stop recording the request in a slot, whose last step was `now`; return whether it was
        recorded."""
        part = self.parts.pop(slot, None)
        if part is None:
            return False
        self._leave(slot, part, now)
        self.tensors.of_slot[slot].fill_(-1)
        return True

    def arrived(self) -> Iterator[tuple[Record | None, FinishedRequest | None, bool]]:
        """Yield the parts of requests that reached host memory, in order; each frees its slab.

        Copied rows of a part (None: no row to learn from); with the last part the request (None:
        nothing was drafted for it); whether it is the last part.
        """
        while self._leaving and self.copies.is_here(self._leaving[0][0].slab):
            part, ended = self._leaving.popleft()
            finished = self._finished(part, ended)
            yield self._read(part, finished), finished, ended is not None

    def _leave(self, slot: int, part: Part, ended: float | None) -> None:
        self.copies.send(part.slab, slot)
        self._leaving.append((part, ended))

    def _finished(self, part: Part, ended: float | None) -> FinishedRequest | None:
        missed, steps, committed = (total[part.slab] for total in self.copies.sums)
        if ended is None or ended <= part.began or not steps:  # a host tensor
            return None
        sums = missed.item(), int(steps), int(committed)  # a host tensor each
        return FinishedRequest(*sums, ended - part.began)

    def _read(self, part: Part, finished: FinishedRequest | None) -> Record | None:
        """Copy a part's rows and free its slab; None: no row to learn from."""
        slab, kept = part.slab, self.copies.rows
        self.free.append(slab)
        begin, end = int(kept.begin[slab]), int(kept.end[slab])  # a host number each
        tokens = kept.token[slab, : end - begin].long()
        labels = torch.arange(begin + 1, end + 1) >= part.prompt
        if part.stops:
            ends = [word in part.stops for word in tokens.tolist()]  # a host tensor
            last = (torch.tensor(ends, dtype=torch.bool) & labels).cumsum(0)
            within = int((last == 0).sum()) + 1  # a host tensor
            tokens, labels = tokens[:within], labels[:within]
        if not labels.any():  # a host tensor
            return None
        rows = slice(len(tokens))
        states, last = kept.states[slab, rows].clone(), kept.last[slab, rows].clone()
        tau = 0.0 if finished is None else finished.tau
        return Record(part.request, states, last, tokens, labels, tau)

    def _give(self, slot: int, part: Part) -> None:
        self.tensors.of_slot[slot].fill_(part.slab)
        self.copies.give(part.slab)
        self.parts[slot] = part
