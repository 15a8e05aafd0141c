"""Requests that verify only the best path of their tree: their sampling reads earlier outputs."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams


def looks_back(params: SamplingParams | None) -> bool:
    """Return whether sampling reads earlier output tokens of the step.

    vLLM's processors take them from the rows before a position, which is wrong for a tree.
    """
    return params is not None and (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.bad_words)  # a host list
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )
