"""Chain fallback for requests whose sampling looks back at the output."""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch


def looks_back(params: SamplingParams) -> bool:
    """Whether what a request samples depends on the order of the tokens before it.

    Penalties, bad words, thinking budgets and grammars do. vLLM's processors take those tokens
    from the rows before a position: right for a chain, wrong for a tree.
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
    """Which request slots of an engine verify the best path of their tree alone.

    Attributes:
        everyone: all requests do: a logits processor of the user's may look at anything.
    """

    def __init__(self, num_slots: int) -> None:
        self.everyone = False
        self._slots = np.zeros(num_slots, dtype=bool)

    def note(self, req_idx: int, params: SamplingParams | None) -> None:
        """A request that samples by `params` comes to `req_idx`."""
        self._slots[req_idx] = self.everyone or (params is not None and looks_back(params))

    def among(self, batch: InputBatch) -> np.ndarray:
        """[R] bool, on the host."""
        return self._slots[batch.idx_mapping_np]
