"""What is recorded of a running engine's requests, and who gets it.

The requests' texts are whoever's they are: nothing is recorded of those that opted out, and nothing
here is written anywhere but into memory of a fixed size.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.options import Requests
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.adapt.slabs import Slabs
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.runner.step_batch import StepBatch
from vllm_specblock.engine.undrafted import wants_drafts
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.feedback.slab_tensors import StepToRecord

SAYS = "specblock_adapt"
"""Key of a request's `extra_args`, `vllm_xargs` over HTTP: 1 wants to be recorded, 0 not."""

RECORDED_TOKENS, RECORDED = "adapt_recorded_tokens", "adapt_recorded_requests"
UNRECORDED, OPTED_OUT = "adapt_unrecorded_requests", "adapt_opted_out_requests"


class Sink(Protocol):
    """Takes what was recorded."""

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """Take a part of a request.

        Args:
            record: its rows, the taker's own.
            finished: of the whole request, with its last part; None: it goes on in another.

        Returns:
            whether there was room for it.
        """


class Turning(Protocol):
    """What changes weights between two steps."""

    def turn(self) -> None:
        """Between two steps, on the stream on which they run."""

    def counts(self) -> Counts:
        """For the metrics, always of the same names."""


class Nobody:
    """Takes everything and keeps nothing: for watching."""

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        return True


def wanted(params: SamplingParams) -> bool | None:
    """Whether a request says that it is to be recorded; None: it says nothing.

    What is no clear yes is a no.
    """
    said: Any = (params.extra_args or {}).get(SAYS)
    return None if said is None else str(said) in ("1", "1.0", "True")


class Recorder:
    """Records the requests of an engine, step by step.

    Args:
        slabs: as many request slots as the engine's.
        columns: which of a step's states are the drafter's low, mid and high one.
        parent: [S, N] int32, of the trees under verification.
        reach: rows that a decode step may commit of a request.
        requests: whom to record, see `AdaptConfig`.
        sink: gets what was recorded.
        versions: gives the drafter other weights; None: it keeps those that it has.

    Attributes:
        warming_up: requests that come are made up: nobody is recorded.
    """

    def __init__(
        self,
        slabs: Slabs,
        columns: tuple[int, int, int],
        parent: torch.Tensor,
        reach: int,
        requests: Requests,
        sink: Sink,
        versions: Turning | None = None,
    ) -> None:
        self.slabs, self.columns, self.parent, self.reach = slabs, columns, parent, reach
        self.requests, self.sink, self.versions = requests, sink, versions
        self.warming_up = False
        self._slots: dict[str, int] = {}
        self._total: Counter[str] = Counter()
        self._now = time.perf_counter()

    # ---- once per request ----

    def begin(self, slot: int, request: NewRequestData) -> None:
        """A request comes to a slot, for the first time or after a preemption."""
        params = request.sampling_params
        if params is None or request.prompt_embeds is not None or self.warming_up:
            return  # no text to learn
        says = wanted(params)
        if (
            says is False
            or not wants_drafts(params)
            or (self.requests == "marked" and says is None)
        ):
            self._total[OPTED_OUT] += 1
            return
        stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        prompt, computed = len(request.prefill_token_ids), request.num_computed_tokens
        self._hand_on()  # a slab may be free by it
        now = time.perf_counter()
        if self.slabs.begin(slot, request.req_id, prompt, computed, now, stops):
            self._slots[request.req_id] = slot
        else:
            self._total[UNRECORDED] += 1

    def end(self, request: str) -> None:
        """A request goes: it is done, or preempted."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._leave(slot)

    # ---- once per step ----

    def turn(self, slots: np.ndarray) -> None:
        """Before a step of the requests in some slots: a version that waits is taken, and whose
        slab is full goes on in another."""
        if self.versions is not None:
            self.versions.turn()
        self._now = time.perf_counter()
        self.slabs.before_step()
        self._hand_on()
        for slot in self.slabs.crowded(slots.tolist(), self.reach):  # a host array
            if self.slabs.move_on(slot):
                self._hand_on()
            else:
                self._leave(slot)

    def record(
        self,
        rows: StepBatch,
        committed: CommittedTokens,
        hidden_states: list[torch.Tensor],
        verified: VerifiedTrees,
    ) -> None:
        """Take in a step, eagerly or in a graph; its trees have not been replaced yet.

        Args:
            hidden_states: per layer that a drafter reads [batch rows, Ht], and what the LM head
                reads last.
        """
        low, mid, high = (hidden_states[column] for column in self.columns)
        step = StepToRecord(
            rows.request,
            committed.source,
            committed.token,
            committed.position,
            committed.kv_slot,
            committed.last,
            (low, mid, high),
            hidden_states[-1],
            verified,
            self.parent,
        )
        record_step(self.slabs.tensors, step)

    def rest(self, slots: np.ndarray) -> None:
        """Heads rest in this step, which leaves a gap: recording ends for its requests."""
        self._now = time.perf_counter()
        for slot in slots.tolist():  # a host array
            self._leave(slot)

    def counts(self) -> Counts:
        names = (RECORDED_TOKENS, RECORDED, UNRECORDED, OPTED_OUT)
        own: Counts = {(name, 0): self._total[name] for name in names}
        return own if self.versions is None else self.versions.counts() | own

    def _leave(self, slot: int) -> None:
        if self.slabs.end(slot, self._now):
            self._hand_on()

    def _hand_on(self) -> None:
        """Give the sink what has left the slabs and is in host memory by now."""
        for record, finished, last in self.slabs.arrived():
            if record is None:
                continue
            taken = self.sink.offer(record, finished)
            if taken:
                self._total[RECORDED_TOKENS] += int(record.labels.sum())  # a host tensor
            if last:
                self._total[RECORDED if taken else UNRECORDED] += 1
