"""Requests without drafts: `extra_args={"specblock_draft": 0}`, over HTTP `vllm_xargs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.input_batch import InputBatch

KEY = "specblock_draft"


def wants_drafts(params: SamplingParams | None) -> bool:
    """Whether a request is to be drafted for; by default it is."""
    return params is None or not params.extra_args or params.extra_args.get(KEY, 1) != 0


def check(params: SamplingParams) -> None:
    """Refuse a request whose switch is neither on nor off."""
    from vllm.exceptions import VLLMValidationError

    given: Any = (params.extra_args or {}).get(KEY, 1)
    if not isinstance(given, (bool, int, float)) or given not in (0, 1):
        raise VLLMValidationError(
            f'"{KEY}" is {given!r}, but it must be true or false, or 1 or 0.',
            parameter="extra_args",
            value=given,
        )


class UndraftedRequests:
    """Which request slots of an engine are not drafted for."""

    def __init__(self, num_slots: int) -> None:
        self._slots = np.zeros(num_slots, dtype=bool)

    def note(self, req_idx: int, params: SamplingParams | None) -> None:
        """A request that samples by `params` comes to `req_idx`."""
        self._slots[req_idx] = not wants_drafts(params)

    def among(self, batch: InputBatch) -> np.ndarray:
        """[R] bool, on the host."""
        return self._slots[batch.idx_mapping_np]


def fills_block(batch: InputBatch, block_size: int) -> bool:
    """Whether a step without drafts fills a block of the cache for some request.

    Only full blocks are found again as prefixes.
    """
    before = batch.num_computed_tokens_np
    after = before + batch.num_scheduled_tokens[: batch.num_reqs]
    return bool((after // block_size > before // block_size).any())  # host arrays


def install() -> None:
    """P5: the scheduler gives every request as many drafts as the next.

    It runs in the engine's process. Other processes do not load it, hence the detour.
    """
    from vllm.config.scheduler import SchedulerConfig

    def make(original: Function) -> Function:
        def get_scheduler_cls(self: SchedulerConfig) -> type[SchedulerInterface]:
            from vllm.v1.core.sched.scheduler import Scheduler

            patch(Scheduler, "schedule", _schedule)
            patch(Scheduler, "_update_after_schedule", _update_after_schedule)
            found: type[SchedulerInterface] = original(self)
            return found

        return get_scheduler_cls

    patch(SchedulerConfig, "get_scheduler_cls", make)


def _schedule(original: Function) -> Function:
    def schedule(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if is_ours(self.vllm_config.speculative_config):
            # Proposed ones or, with asynchronous scheduling, placeholders.
            for request in self.running:
                if request.spec_token_ids and not wants_drafts(request.sampling_params):
                    request.spec_token_ids = []
        output: SchedulerOutput = original(self, *args, **kwargs)
        return output

    return schedule


def _update_after_schedule(original: Function) -> Function:
    def update_after_schedule(self: Scheduler, scheduler_output: SchedulerOutput) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts and is_ours(self.vllm_config.speculative_config):
            # vLLM pads a request that starts with a single token, so that a step is uniform.
            for req_id in list(drafts):
                if not wants_drafts(self.requests[req_id].sampling_params):
                    padding = len(drafts.pop(req_id))
                    scheduler_output.num_scheduled_tokens[req_id] -= padding
                    scheduler_output.total_num_scheduled_tokens -= padding
        original(self, scheduler_output)

    return update_after_schedule
