"""What tree expansion reads of draft logits, in torch: top tokens, rank features, bucket."""

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


def read_heads_reference(
    normed: torch.Tensor,
    logits: torch.Tensor,
    offset: torch.Tensor,
    rank_head: nn.Sequential,
    width: int,
    scope: int | None,
    sharpness: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and results as `read_heads` has them; any leading shape."""
    top, features = top_and_features(logits, width, scope)
    index = top.indices[..., :width]
    rank_logits = rank_head(torch.cat([normed, features.to(normed.dtype)], dim=-1))
    best = top.values[..., :width]
    return top_logprobs(logits, best, sharpness), index + offset[index], rank_logits.argmax(-1)


def top_logprobs(
    logits: torch.Tensor, best: torch.Tensor, sharpness: torch.Tensor | None
) -> torch.Tensor:
    """The logarithms of the softmax of β · logits, where the best logits are.

    Args:
        logits: [R, ..., Vd].
        best: [R, ..., B], some of them.
        sharpness: [R] fp32, β; None: 1.

    Returns:
        [R, ..., B] float32.
    """
    logits, best = logits.float(), best.float()
    if sharpness is not None:
        factor = sharpness.view(-1, *[1] * (logits.dim() - 1))
        logits, best = logits * factor, best * factor
    return best - logits.logsumexp(-1, keepdim=True)


def best_tokens_reference(
    logits: torch.Tensor,
    offset: torch.Tensor,
    width: int,
    scale: float = 1.0,
    sharpness: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `best_tokens` has them."""
    logits = logits.float() if scale == 1 else logits.float() * scale
    top = logits.topk(width)
    return top_logprobs(logits, top.values, sharpness), top.indices + offset[top.indices]
