"""Torch reference of the LM and rank head: top-k tokens, rank features, rank bucket."""

from __future__ import annotations

import torch
from torch import nn

FEATURE_LOGPROBS = 10
"""Log-probabilities among the rank features."""


def rank_features(top: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """ψ, the rank head's summary of a draft distribution (appendix B).

    Args:
        top: [..., 10], the largest logits, descending.
        within: [..., n], the logits over which probabilities and entropy are taken.

    Returns:
        [..., 15] float32: log-probabilities of the top 10; gaps of the first logit to ranks 2,
        3 and 5; probability of the first; entropy in nats.
    """
    top, within = top.float(), within.float()
    total = within.logsumexp(-1, keepdim=True)
    logprob, spread = top - total, within - total
    entropy = -(spread.exp() * spread).sum(-1, keepdim=True)
    best = top[..., :1]  # slices: indexing by a list would copy it to the device, and sync
    gaps = (best - top[..., 1:3], best - top[..., 4:5])
    return torch.cat([logprob, *gaps, logprob[..., :1].exp(), entropy], dim=-1)


def top_and_features(
    logits: torch.Tensor, width: int, scope: int | None
) -> tuple[torch.return_types.topk, torch.Tensor]:
    """The best logits and ψ, with one top-k for both.

    Args:
        logits: [..., Vd].
        width: as many of the best are wanted at least (if there are as many).
        scope: logits over which ψ is taken, at least 10; None: all.

    Returns:
        the top-k, at least 10 of them, and [..., 15] float32. Which of equal logits come first,
        or at all, is left to `torch.topk`.
    """
    reach = scope or FEATURE_LOGPROBS
    top = logits.topk(min(max(reach, width), logits.shape[-1]))
    within = logits if scope is None else top.values[..., :reach]
    return top, rank_features(top.values[..., :FEATURE_LOGPROBS], within)


def lm_and_rank_head_reference(
    normed: torch.Tensor,
    logits: torch.Tensor,
    offset: torch.Tensor,
    rank_head: nn.Sequential,
    width: int,
    scope: int | None,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and results as `lm_and_rank_head` has them; any leading shape."""
    top, features = top_and_features(logits, width, scope)
    index = top.indices[..., :width]
    rank_logits = rank_head(torch.cat([normed, features.to(normed.dtype)], dim=-1))
    best = top.values[..., :width]
    return top_logprobs(logits, best, beta), index + offset[index], rank_logits.argmax(-1)


def top_logprobs(
    logits: torch.Tensor, best: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """The logarithms of the softmax of β · logits, where the best logits are.

    Args:
        logits: [R, ..., Vd].
        best: [R, ..., B], some of them.
        beta: [R] fp32, β; None: 1.

    Returns:
        [R, ..., B] float32.
    """
    logits, best = logits.float(), best.float()
    if beta is not None:
        factor = beta.view(-1, *[1] * (logits.dim() - 1))
        logits, best = logits * factor, best * factor
    return best - logits.logsumexp(-1, keepdim=True)


def topk_tokens_reference(
    logits: torch.Tensor,
    offset: torch.Tensor,
    width: int,
    scale: float = 1.0,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `topk_tokens` has them."""
    logits = logits.float() if scale == 1 else logits.float() * scale
    top = logits.topk(width)
    return top_logprobs(logits, top.values, beta), top.indices + offset[top.indices]
