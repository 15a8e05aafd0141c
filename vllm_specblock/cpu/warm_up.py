"""Compilation of the loops that requests need, or loading from disk."""

from __future__ import annotations

import torch

from vllm_specblock.cpu.gumbel import gumbel_sample, sample_by_depth
from vllm_specblock.cpu.top_k_top_p import apply_top_k_top_p


def compile_loops(dtype: torch.dtype) -> None:
    """Draw a token with and without top-p; `dtype`: the target's (processed logits are fp32)."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.empty(1, 1, dtype=torch.int64)
    for each in {dtype, torch.float32}:
        logits, heat = torch.zeros(1, 2, dtype=each), torch.ones(1)
        gumbel_sample(
            token, torch.empty(1, 1), None, logits, one, one, one, heat, 2, False, False, False
        )
    apply_top_k_top_p(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32), torch.full((1,), 0.5))
    row = torch.zeros(1, dtype=torch.int32)  # types as in a step
    sample_by_depth(lambda rows: rows, row, torch.arange(2, dtype=torch.int32), row, row[None])
