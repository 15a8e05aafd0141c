"""Requests without drafts: `extra_args={"specblock_draft": 0}`, over HTTP `vllm_xargs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

KEY = "specblock_draft"


def wants_drafts(params: SamplingParams | None) -> bool:
    """Whether a request takes drafts; vLLM verifies none beside `logprob_token_ids`."""
    if params is None:
        return True
    return not params.logprob_token_ids and (params.extra_args or {}).get(KEY, 1) != 0


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
