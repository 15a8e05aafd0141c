"""Compiling what requests may need and vLLM's warm-up does not ask for, or reading it from disk."""

from __future__ import annotations

import torch

from vllm_specblock.engine.cpu.gumbel import gumbel_sample
from vllm_specblock.engine.cpu.top_k_top_p import apply_top_k_top_p


def compile_loops(dtype: torch.dtype) -> None:
    """Draw a token with and without top-p; `dtype` is the target's, processed logits are fp32."""
    one, position = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    token, score = torch.empty(1, 1, dtype=torch.int64), torch.empty(1, 1)
    for each in {dtype, torch.float32}:
        logits = torch.zeros(1, 2, dtype=each)
        gumbel_sample(
            token,
            0,
            score,
            0,
            None,
            0,
            0,
            0,
            0,
            0,
            logits,
            0,
            one,
            one,
            position,
            torch.ones(1),
            2,
            2,
            False,
            False,
            False,
            False,
        )
    apply_top_k_top_p(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32), torch.full((1,), 0.5))
