"""vLLM's scheduler for draft trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specblock.engine.request_drafts import SHARE, wants_drafts

UNDRAFTED = "specblock_undrafted"
"""Attribute of a `ModelRunnerOutput`: ids of its requests without new drafts, a set."""

FORGET = "\U0010ffff specblock_forget"
"""Id of no request, reported as finished: workers are to forget all finished requests. It sorts
after other ids, so that they see those of the same step first."""


class _TrimmedMetrics(RequestSpecDecodeMetrics):
    """RequestSpecDecodeMetrics that ignores vLLM's own call, which precedes the trim."""

    def observe(self, *_: Any, **__: Any) -> None:
        pass


class TreeScheduling(Scheduler):
    """Scheduler that counts decode steps, as `metrics/acceptance.py` defines them.

    - Accepted drafts are counted after the output is trimmed at max_tokens, EOS or a stop token.
    - Placeholder drafts are not counted: vLLM's padding, and steps of paused drafting.
    - No drafts are scheduled while drafting is paused, or for a request that declines them.
    - A streaming-input session that stops inside an accepted path resumes at the stop; with
      recurrent layers it gets no drafts.
    - A session that is preempted samples its step in flight again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paused = False
        self._drafted: set[str] = set()  # requests with a tree
        # Of the request whose output is next: where its drafts count, and how many there are.
        self._verified: tuple[SpecDecodingStats | None, int] = None, 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self.running:  # drafts, or placeholders if asynchronous
            if self._paused or not self._wants_drafts(request):
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def _wants_drafts(self, request: Request) -> bool:
        # Recurrent states cannot go back to a session's stop, and a new request has none yet.
        without = request.resumable or not request.num_computed_tokens
        if without and self.vllm_config.model_config.is_hybrid:
            return False
        return wants_drafts(request.sampling_params)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.finished_req_ids.add(FORGET)
        return super().reset_prefix_cache(*args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if not self._paused:  # else placeholders
            super().update_draft_token_ids(draft_token_ids)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        # vLLM pads a new request with one token left, so that the step is uniform.
        for req_id in list(drafts):
            if not self._wants_drafts(self.requests[req_id]):
                padding = len(drafts.pop(req_id))
                scheduler_output.num_scheduled_tokens[req_id] -= padding
                scheduler_output.total_num_scheduled_tokens -= padding
        super()._update_after_schedule(scheduler_output)

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if request.cache_salt and params is not None:
            # Its speed is to tell others nothing: its answer is no more shared than its prefix.
            params.extra_args = {SHARE: 0, **(params.extra_args or {})}
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = _TrimmedMetrics.new(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        new = {each.req_id for each in scheduler_output.scheduled_new_reqs}
        self._drafted -= new | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduled := scheduler_output.num_scheduled_tokens.keys():
            undrafted: frozenset[str] = getattr(model_runner_output, UNDRAFTED, frozenset())
            self._paused = len(undrafted) == len(scheduled)
            self._drafted = ((self._drafted | scheduled) - undrafted) & self.requests.keys()
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Record the number of drafts; they are counted after the trim."""
        if request_id not in self._drafted:
            return spec_decoding_stats
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        self._verified = stats, num_draft_tokens - invalid
        return stats

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        first, update = not request.num_output_tokens, super()._update_request_with_output
        emitted, stopped = update(request, new_token_ids, *args, **kwargs)
        (stats, drafts), self._verified = self._verified, (None, 0)
        if not first:
            accepted = len(emitted) - 1
            if stats is not None:
                stats.observe_draft(drafts, accepted)
            if (metrics := request.spec_decode_metrics) is not None:
                detailed = self.spec_decode_metrics_level == "detailed"
                RequestSpecDecodeMetrics.observe(metrics, drafts, accepted, detailed)
        return emitted, stopped

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Preempt a request; drop a session's step in flight, by which vLLM would lose it."""
        super()._preempt_request(request, timestamp, drop_stale_output or request.resumable)

    def _handle_stopped_request(self, request: Request) -> bool:
        """Resume a streaming-input session at its stop, not after the accepted path.

        vLLM counts the whole path as computed before it trims the output.
        """
        if request.resumable:
            frontier = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, frontier)
        return super()._handle_stopped_request(request)
