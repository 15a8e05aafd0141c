"""What a request's sampling parameters mean for its drafts.

In `extra_args` (`vllm_xargs` over HTTP), `"specblock_draft": 0` declines them, and
`"specblock_share": 0` keeps its answer from the drafts of later requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

DRAFT, SHARE = "specblock_draft", "specblock_share"


def check(params: SamplingParams, lora: bool) -> None:
    """Refuse values of these keys that are not booleans; lora: the engine serves adapters."""
    from vllm.exceptions import VLLMValidationError

    # vLLM's kernels would write outside of these logits, or fail.
    asked = params.prompt_logprobs, params.prompt_logprob_token_ids
    if lora and any(each is not None for each in asked):
        raise VLLMValidationError(
            "prompt_logprobs is set, but vLLM does not map the rows of a prompt to LoRA adapters: "
            "drop it, or ask an engine without enable_lora.",
            parameter="prompt_logprobs",
        )
    for key in DRAFT, SHARE:
        given: Any = (params.extra_args or {}).get(key, 1)
        if not isinstance(given, (bool, int, float)) or given not in (0, 1):
            raise VLLMValidationError(
                f'"{key}" is {given!r}, but it must be true, false, 1 or 0.',
                parameter="extra_args",
                value=given,
            )


def wants_drafts(params: SamplingParams | None) -> bool:
    """Return whether a request accepts drafts; vLLM verifies none with `logprob_token_ids`."""
    if params is None:
        return True
    return not params.logprob_token_ids and (params.extra_args or {}).get(DRAFT, 1) != 0


def shares(params: SamplingParams | None) -> bool:
    """Return whether later requests may be drafted for by this one's answer."""
    return params is None or (params.extra_args or {}).get(SHARE, 1) != 0


def looks_back(params: SamplingParams | None) -> bool:
    """Return whether sampling reads earlier output tokens of the step.

    vLLM's processors take them from the rows before a position, which is wrong for a tree: such
    a request verifies only the best path of its tree.
    """
    return params is not None and (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.bad_words)  # a host list
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )
