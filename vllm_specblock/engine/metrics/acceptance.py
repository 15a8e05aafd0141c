"""Acceptance length τ, computed from vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specblock.engine.patches import Function, replaces

TOKENS = "vllm:generation_tokens"
REQUESTS = "vllm:time_to_first_token_seconds"
"""Histogram; its count is the number of requests with a first token."""
STEPS = "vllm:inter_token_latency_seconds"
"""Histogram; its count is the number of decode steps."""


def acceptance_length(counts: Mapping[str, float]) -> float:
    """Return τ, the tokens emitted per decode step; 1 without decode steps.

    A decode step is a target forward that emits tokens of a request, drafts or not; the forward
    that ends the prompt does not count, and the recomputed prompt of a preempted request does.
    Tokens after max_tokens, EOS or a stop do not count. Each of n sequences is a request.

    Args:
        counts: emitted tokens, first tokens included, and requests with a first token and decode
            steps of all requests (default: 0), by vLLM's names.
    """
    tokens, steps = counts[TOKENS] - counts.get(REQUESTS, 0), counts.get(STEPS, 0)
    return tokens / steps if steps else 1.0


def subtract_after_stops() -> None:
    """Do not count the tokens after a stop string, which vLLM counts and then drops. Idempotent."""
    from vllm.v1.engine.output_processor import OutputProcessor

    @replaces(OutputProcessor, "process_outputs")
    def process_outputs(
        original: Function, self: Any, outputs: list[Any], *args: Any, **more: Any
    ) -> Any:
        counted = sum([len(output.new_token_ids) for output in outputs])
        result = original(self, outputs, *args, **more)
        stats = args[1] if len(args) > 1 else more.get("iteration_stats")
        if stats is not None:
            kept = sum([len(output.new_token_ids) for output in outputs])
            stats.num_generation_tokens -= counted - kept
        return result
