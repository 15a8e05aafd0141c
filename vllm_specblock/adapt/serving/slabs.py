"""Slabs of recorded rows, and their requests.

Steps write rows on the device (`triton_kernels/feedback/record_step.py`). Between steps the host
assigns and frees slabs without waiting for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS, ROWS
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.adapt.serving.slab_copies import HostSlabs, PinnedSlabs
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors

SLABS = 16
"""Maximum requests recorded at a time; 8 MiB each for an 8B target in 16 bits."""


@dataclass(frozen=True)
class Part:
    """Rows of a request in a slab: an answer, or a part of it.

    Attributes:
        request: id.
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
        """Record a new request in a slot, from near its prompt's end on.

        Args:
            prompt: its tokens; after a preemption with those of its answer.
            computed: cached tokens of these, which no step runs.
            now: seconds.
            stops: stop tokens.

        Returns:
            Whether a slab was free.
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
        found = []
        for slot in slots:
            part = self.parts.get(slot)
            if part is not None:
                used = self.copies.most_rows(part.slab, reach)
                if used > 0 and used + reach > self.rows:
                    found.append(slot)
        return found

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
        """Stop recording the request in a slot; return whether it was recorded.

        Args:
            now: time of its last step, seconds.
        """
        part = self.parts.pop(slot, None)
        if part is None:
            return False
        self._leave(slot, part, now)
        self.tensors.of_slot[slot].fill_(-1)
        return True

    def arrived(self) -> Iterator[tuple[Record | None, FinishedRequest | None, bool]]:
        """Yield the parts of requests that reached host memory, in order; each frees its slab.

        Yields:
            Copied rows of a part (None: no row to learn from); with the last part the request
            (None: nothing was drafted for it); whether it is the last part.
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
