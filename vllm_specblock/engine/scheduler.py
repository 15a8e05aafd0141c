"""vLLM's scheduler for trees: no drafts while drafting is paused; counts of emitted tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

UNDRAFTED = "specblock_undrafted"
"""Attribute of a `ModelRunnerOutput`: its requests for which nothing was drafted, a set of ids."""


class _TrimmedMetrics(RequestSpecDecodeMetrics):
    """RequestSpecDecodeMetrics that ignores the scheduler's call, which comes before the trim."""

    def observe(self, *_: Any, **__: Any) -> None:
        pass


class TreeScheduling(Scheduler):
    """Scheduler that counts decode steps, as `metrics/acceptance.py` defines them.

    Differs in three things. Accepted drafts are counted after the output is trimmed at max_tokens,
    EOS or a stop token. Drafts are counted only where something was drafted: neither while drafting
    is paused nor where vLLM pads a new request. While drafting is paused, none are scheduled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paused = False
        self._drafted: set[str] = set()  # requests that have a tree
        self._verified: dict[str, int] = {}  # request → drafts of the step in hand
        self._stats: SpecDecodingStats | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._paused:
            for request in self.running:
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = _TrimmedMetrics.new(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        step = scheduler_output
        self._drafted.difference_update(
            [new.req_id for new in step.scheduled_new_reqs],
            step.scheduled_cached_reqs.resumed_req_ids,
        )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if step.num_scheduled_tokens:
            undrafted: frozenset[str] = getattr(model_runner_output, UNDRAFTED, frozenset())
            self._paused = len(undrafted) == len(step.num_scheduled_tokens)
            self._drafted |= step.num_scheduled_tokens.keys()
            self._drafted = (self._drafted - undrafted) & self.requests.keys()
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Note the drafts, which are counted after the trim."""
        if request_id not in self._drafted:
            return spec_decoding_stats
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self._verified[request_id] = num_draft_tokens - invalid
        if not self.log_stats:
            return None
        self._stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        return self._stats

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        first = not request.num_output_tokens
        emitted, stopped = super()._update_request_with_output(
            request, new_token_ids, *args, **kwargs
        )
        drafts = self._verified.pop(request.request_id, None)
        if not first:
            accepted = len(emitted) - 1
            if drafts is not None and self._stats is not None:
                self._stats.observe_draft(drafts, accepted)
            if request.spec_decode_metrics is not None:
                detailed = self.spec_decode_metrics_level == "detailed"
                RequestSpecDecodeMetrics.observe(
                    request.spec_decode_metrics, drafts or 0, accepted, detailed
                )
        return emitted, stopped


@cache
def tree_scheduler(base: type[Scheduler]) -> type[Scheduler]:
    """Return `base`, vLLM's choice or the user's, with what `TreeScheduling` adds."""
    return type(f"Tree{base.__name__}", (TreeScheduling, base), {})
