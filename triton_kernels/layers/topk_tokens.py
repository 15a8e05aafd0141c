"""Top-k draft tokens and their log-probabilities, in two launches.

`lm_and_rank_head.py` without a rank head: the first launch is the same.
"""

from __future__ import annotations

import torch

from ..op import op
from ..optional_triton import jit, tl
from .best_of_chunks import best_of_chunks, merge_chunks, top_logprobs


def topk_tokens_triton(
    logits: torch.Tensor,
    offset: torch.Tensor | None,
    width: int,
    scale: float = 1.0,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels; arguments and results as in `topk_tokens`."""
    lead = logits.shape[:-1]
    chunks, constants = best_of_chunks(logits, width, beta, scale=scale)
    logprob = torch.empty(*lead, width, dtype=torch.float32, device=logits.device)
    token = torch.empty(*lead, width, dtype=torch.int64, device=logits.device)
    _merge_kernel[(lead.numel(),)](chunks, offset, logprob, token, WIDTH=width, MERGE=constants)
    return logprob, token


@op(topk_tokens_triton)
def topk_tokens(
    logits: torch.Tensor,
    offset: torch.Tensor | None,
    width: int,
    scale: float = 1.0,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens.

    Args:
        logits: [R, ..., Vd], of any floating dtype.
        offset: [Vd] int64, target id − draft id; None: draft ids are wanted.
        width: B, at most Vd.
        scale, beta: factors on the logits, above 0; beta is [R] fp32, None: 1.

    Returns:
        [R, ..., B] float32, log-probabilities over the draft vocabulary, descending;
        [R, ..., B] int64, target or draft ids.
    """
    logits = logits.float() if scale == 1 else logits.float() * scale
    best, token = logits.topk(width)
    token = token if offset is None else token + offset[token]
    return top_logprobs(logits, best, beta), token


@jit
def _merge_kernel(
    chunks,  # Chunks
    offset_ptr,  # [vocab] int64, or None
    logprob_ptr,  # [rows, WIDTH] fp32
    token_ptr,  # [rows, WIDTH] int64
    MERGE: tl.constexpr,  # MergeConstants
    WIDTH: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    merge_chunks(chunks, offset_ptr, logprob_ptr, token_ptr, row, MERGE, WIDTH)
