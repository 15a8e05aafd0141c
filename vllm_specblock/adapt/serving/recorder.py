"""Recording of requests for adaptation, in memory of a fixed size."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_specblock.adapt.link.folder_link import FolderLink
from vllm_specblock.adapt.options import Requests
from vllm_specblock.adapt.serving.slabs import Slabs
from vllm_specblock.adapt.serving.swaps import Swaps
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.request_drafts import wants_drafts
from vllm_specblock.engine.step_observer import StepObserver
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.feedback.record_step import StepToRecord, record_step

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_specblock.engine.runner.step_batch import StepBatch

SAYS = "specblock_adapt"
"""Key of `extra_args` (`vllm_xargs` over HTTP): 1: record the request; 0: do not."""

RECORDED_TOKENS, RECORDED = "adapt_recorded_tokens", "adapt_recorded_requests"
UNRECORDED, OPTED_OUT = "adapt_unrecorded_requests", "adapt_opted_out_requests"


def wanted(params: SamplingParams, requests: Requests) -> bool:
    """Return whether a request wants recording. An invalid value means no."""
    said = (params.extra_args or {}).get(SAYS, requests == "all")
    return str(said) in ("1", "1.0", "True")


class Recorder(StepObserver):
    """Records the requests of an engine, step by step.

    Args:
        columns: indices of the drafter's low, mid and high hidden state.
        parent: [S, N] int32, of the trees under verification.
        reach: maximum rows that a decode step may commit for a request.
        requests: which requests to record, see `AdaptConfig`.
        sink: receives the records; None: they are dropped.
    """

    def __init__(
        self,
        slabs: Slabs,
        columns: tuple[int, int, int],
        parent: torch.Tensor,
        reach: int,
        requests: Requests,
        sink: FolderLink | None,
        swaps: Swaps | None = None,
    ) -> None:
        self.slabs, self.columns, self.parent, self.reach = slabs, columns, parent, reach
        self.requests, self.sink, self.swaps = requests, sink, swaps
        self._slots: dict[str, int] = {}
        self._total: Counter[str] = Counter()
        self._now = time.perf_counter()

    def begin(self, slot: int, request: NewRequestData) -> None:
        """Start recording a new request, or one resumed after a preemption."""
        params = request.sampling_params
        if params is None or request.prompt_embeds is not None:
            return  # no text to learn from
        if not (wanted(params, self.requests) and wants_drafts(params)):
            self._total[OPTED_OUT] += 1
            return
        stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        prompt, computed = len(request.prefill_token_ids), request.num_computed_tokens
        self._hand_on()  # may free a slab
        now = time.perf_counter()
        if self.slabs.begin(slot, request.req_id, prompt, computed, now, stops):
            self._slots[request.req_id] = slot
        else:
            self._total[UNRECORDED] += 1

    def end(self, request: str) -> None:
        """Stop recording a request that is finished or preempted."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._leave(slot)

    def between_steps(self, slots: np.ndarray) -> None:
        """Swap in a waiting version, and continue full slabs in new ones."""
        if self.swaps is not None:
            self.swaps.turn()
        self._now = time.perf_counter()
        self.slabs.copies.before_step()
        self._hand_on()
        for slot in self.slabs.crowded(slots.tolist(), self.reach):  # a host array
            if self.slabs.move_on(slot):
                self._hand_on()
            else:
                self._leave(slot)

    def record(self, rows: StepBatch, committed: CommittedTokens, verified: VerifiedTrees) -> None:
        low, mid, high = (rows.hidden_states[column] for column in self.columns)
        step = StepToRecord(
            rows.request,
            committed.source,
            committed.token,
            committed.position,
            committed.kv_slot,
            committed.last,
            (low, mid, high),
            rows.hidden_states[-1],
            verified,
            self.parent,
        )
        record_step(self.slabs.tensors, step)

    def pause(self, slots: np.ndarray) -> None:
        """Stop recording these requests: a paused step leaves a gap."""
        self._now = time.perf_counter()
        for slot in slots.tolist():  # a host array
            self._leave(slot)

    def counts(self) -> Counts:
        names = (RECORDED_TOKENS, RECORDED, UNRECORDED, OPTED_OUT)
        own: Counts = {(name, 0): self._total[name] for name in names}
        return own if self.swaps is None else self.swaps.counts() | own

    def _leave(self, slot: int) -> None:
        if self.slabs.end(slot, self._now):
            self._hand_on()

    def _hand_on(self) -> None:
        """Pass finished slabs that have reached host memory to the sink."""
        for record, finished, last in self.slabs.arrived():
            if record is None:
                continue
            taken = self.sink is None or self.sink.offer(record, finished)
            if taken:
                self._total[RECORDED_TOKENS] += int(record.labels.sum())  # a host tensor
            if last:
                self._total[RECORDED if taken else UNRECORDED] += 1
