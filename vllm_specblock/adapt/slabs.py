"""Who is recorded in which slab, and what a slab says when its request is done.

A slab's rows are written by steps (`triton_kernels/feedback/record_step.py`). Here is what happens
between steps, on the host: a request takes a slab, goes on in another one, or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS, ROWS
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors

SLABS = 16
"""Requests that can be recorded at once. Of a target of 4,096 numbers a state in 16 bits a slab of
256 rows takes 8 MiB."""


@dataclass(frozen=True)
class Part:
    """Rows of a request in a slab, all of one answer or a part of it.

    Attributes:
        request: id.
        slab: where they are.
        prompt: tokens that the request came with; those after it are the target's own.
        stops: tokens that end it. What was drafted and accepted beyond is nobody's answer.
        began: when the request came, seconds.
    """

    request: str
    slab: int
    prompt: int
    stops: frozenset[int]
    began: float


class Slabs:
    """The slabs of an engine, in host memory.

    Args:
        slots: S, request slots.
        hidden: Ht.
        dtype: of the target's states.
        slabs: G.
        rows: W; a prompt's end and a step have to fit.

    Attributes:
        tensors: see `SlabTensors`.
        parts: by request slot, who is recorded.
    """

    def __init__(
        self,
        slots: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        slabs: int = SLABS,
        rows: int = ROWS,
    ) -> None:
        self.tensors = SlabTensors.empty(slabs, rows, hidden, slots, dtype)
        self.rows = rows
        self.parts: dict[int, Part] = {}
        self._free = list(range(slabs))
        self._begin, self._end = self.tensors.begin.numpy(), self.tensors.end.numpy()  # a host view

    @property
    def free(self) -> int:
        """Slabs that nobody has."""
        return len(self._free)

    def begin(
        self,
        slot: int,
        request: str,
        prompt: int,
        computed: int,
        now: float,
        stops: Iterable[int] = (),
    ) -> bool:
        """Record the request that comes to a slot, from near its prompt's end on.

        Args:
            slot: nobody in it is recorded.
            prompt: tokens that it comes with, after a preemption those of its answer among them.
            computed: of these, tokens that no step will run: their rows are in the cache.
            now: seconds.
            stops: tokens that will end it.

        Returns:
            whether there was a slab.
        """
        if not self._free:
            return False
        part = Part(request, self._free.pop(0), prompt, frozenset(stops), now)
        for total in (self.tensors.missed, self.tensors.steps, self.tensors.committed):
            total[slot].fill_(0)
        self._give(slot, part, max(computed, prompt - PROMPT_ROWS))
        return True

    def crowded(self, slots: Iterable[int], reach: int) -> list[int]:
        """The slots of some whose slabs have less room than a step may need, `reach` rows."""
        found = []
        for slot in slots:
            part = self.parts.get(slot)
            if part is not None:
                used = self._end[part.slab] - self._begin[part.slab]
                if used > 0 and used + reach > self.rows:
                    found.append(slot)
        return found

    def move_on(self, slot: int) -> Part | None:
        """Let a request go on in another slab.

        Returns:
            its rows so far, to be read; None: there is no other slab, and nothing has changed.
        """
        if not self._free:
            return None
        part = self.parts[slot]
        newest = int(self._end[part.slab])  # a host number
        self._give(slot, replace(part, slab=self._free.pop(0)), newest)
        return part

    def end(self, slot: int) -> Part | None:
        """Record no more of whoever is in a slot; gives the last rows, None where there are none.

        The sums of the slot hold until somebody else is recorded in it.
        """
        part = self.parts.pop(slot, None)
        if part is not None:
            self.tensors.of_slot[slot].fill_(-1)
        return part

    def finished(self, slot: int, part: Part, now: float) -> FinishedRequest | None:
        """What the last part of a request says to the policy; None if nothing was drafted for it.

        Args:
            slot: it was in; nobody has been recorded in it since.
            now: when its last step was, seconds.
        """
        tensors = self.tensors
        steps = int(tensors.steps[slot])  # a host tensor
        if not steps or now <= part.began:
            return None
        misses = tensors.missed[slot].item()  # a host tensor
        tokens = int(tensors.committed[slot])  # a host tensor
        return FinishedRequest(misses, steps, tokens, now - part.began)

    def read(self, part: Part, finished: FinishedRequest | None = None) -> Record | None:
        """Copy a part's rows, and give its slab to the next.

        Args:
            finished: of the request, where this is its last part.

        Returns:
            None where no row is one to learn from.
        """
        slab, tensors = part.slab, self.tensors
        self._free.append(slab)
        begin, end = int(self._begin[slab]), int(self._end[slab])  # a host number each
        tokens = tensors.token[slab, : end - begin].long()
        labels = torch.arange(begin + 1, end + 1) >= part.prompt
        if part.stops:
            ends = [word in part.stops for word in tokens.tolist()]  # a host tensor
            last = (torch.tensor(ends, dtype=torch.bool) & labels).cumsum(0)
            # The first of them belongs to the answer; `cumsum` counts it already.
            within = int((last == 0).sum()) + 1  # a host tensor
            tokens, labels = tokens[:within], labels[:within]
        if not labels.any():  # a host tensor
            return None
        rows = len(tokens)
        sums = () if finished is None else (finished.misses, finished.steps, finished.tokens)
        return Record(
            part.request,
            tensors.states[slab, :rows].clone(),
            tensors.last[slab, :rows].clone(),
            tokens,
            labels,
            *sums,
        )

    def _give(self, slot: int, part: Part, begin: int) -> None:
        for position in (self.tensors.begin, self.tensors.end):
            position[part.slab].fill_(begin)
        self.tensors.of_slot[slot].fill_(part.slab)
        self.parts[slot] = part
