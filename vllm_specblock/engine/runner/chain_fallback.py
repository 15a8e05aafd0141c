"""Chain fallback for requests whose sampling looks back at the output."""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import SamplingParams


def looks_back(params: SamplingParams) -> bool:
    """Whether sampling reads earlier output tokens of the step.

    vLLM's processors take them from the rows before a position, which is wrong for a tree.
    """
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.bad_words)  # a host list
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )


class ChainFallback:
    """Request slots that verify only the best path of their tree.

    Attributes:
        everyone: all requests do, since a custom logits processor may read the output.
    """

    def __init__(self, num_slots: int) -> None:
        self.everyone = False
        self._slots = np.zeros(num_slots, dtype=bool)

    def note(self, req_idx: int, params: SamplingParams | None) -> None:
        """Add a request in slot `req_idx`."""
        self._slots[req_idx] = self.everyone or (params is not None and looks_back(params))

    def among(self, req_idx: np.ndarray) -> np.ndarray:
        """[R] bool, of the requests in these slots."""
        return self._slots[req_idx]
