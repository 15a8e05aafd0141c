"""Top-k tokens, log-probabilities, rank features and rank MLP from draft logits: two launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..op import op
from ..optional_triton import jit, next_power_of_2, tl
from .best_of_chunks import best_of_chunks, merge_chunks, top_logprobs

FEATURE_LOGPROBS = 10
"""Log-probabilities among the rank features."""


def top_and_features(
    logits: torch.Tensor, width: int, scope: int | None
) -> tuple[torch.return_types.topk, torch.Tensor]:
    """Return the best logits, and ψ, the rank head's features (appendix B), by one top-k.

    Args:
        logits: [..., Vd].
        width: minimum number of best logits, if there are as many.
        scope: logits over which probabilities and entropy are taken, at least 10; None: all.

    Returns:
        the top-k, at least 10; [..., 15] float32: log-probabilities of the top 10, gaps of the
        first logit to ranks 2, 3 and 5, probability of the first, entropy in nats.
    """
    reach = scope or FEATURE_LOGPROBS
    found = logits.topk(min(max(reach, width), logits.shape[-1]))
    top = found.values[..., :FEATURE_LOGPROBS].float()
    within = (logits if scope is None else found.values[..., :reach]).float()
    total = within.logsumexp(-1, keepdim=True)
    logprob, spread = top - total, within - total
    entropy = -(spread.exp() * spread).sum(-1, keepdim=True)
    best = top[..., :1]  # slices: indexing by a list would copy it to the device, and sync
    gaps = (best - top[..., 1:3], best - top[..., 4:5])
    return found, torch.cat([logprob, *gaps, logprob[..., :1].exp(), entropy], dim=-1)


class DraftLogits(NamedTuple):
    """What a drafter computes of its positions, and what is wanted."""

    normed: torch.Tensor  # [R, ..., H], input of the LM head
    logits: torch.Tensor  # [R, ..., Vd], its output; Vd at least 10
    offset: torch.Tensor  # [Vd] int64, target id − draft id
    rank_head: nn.Sequential  # linear [hidden, H + 15], SiLU, linear [classes, hidden]; no biases
    width: int  # B, tokens per position, at most Vd
    scope: int | None  # logits over which the rank features are taken, at least 10; None: all
    # [R] fp32, above 0, factor of the logits for log-probabilities, not for the rank head. None: 1.
    beta: torch.Tensor | None = None


def lm_and_rank_head_triton(
    given: DraftLogits,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernels; see `lm_and_rank_head`.

    torch computes the rank head's product with `normed`; the kernel adds the features' part.
    """
    normed, logits, offset, rank_head, width, scope, beta = given
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    size = normed.shape[-1]
    layers: Any = rank_head  # Sequential is untyped
    first, second = layers[0].weight.detach(), layers[2].weight.detach().contiguous()
    of_state = F.linear(normed, first[:, :size]).reshape(-1, len(first)).contiguous()
    most = min(max(scope or FEATURE_LOGPROBS, width), vocab)
    chunks, constants = best_of_chunks(logits, most, beta, spread=scope is None)
    rows, device = len(of_state), logits.device
    logprob = torch.empty(rows, width, dtype=torch.float32, device=device)
    token = torch.empty(rows, width, dtype=torch.int64, device=device)
    bucket = torch.empty(rows, dtype=torch.int64, device=device)
    _merge_and_rank_kernel[(rows,)](
        chunks,
        offset,
        of_state,
        first,
        first.stride(0),
        second,
        logprob,
        token,
        bucket,
        size,
        MERGE=constants,
        WIDTH=width,
        SCOPE=0 if scope is None else min(scope, most),
        HIDDEN=len(first),
        CLASSES=len(second),
    )
    return logprob.view(*lead, width), token.view(*lead, width), bucket.view(lead)


@op(lm_and_rank_head_triton)
def lm_and_rank_head(given: DraftLogits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, log-probabilities and rank buckets of positions.

    Returns:
        [R, ..., B] float32, log-probabilities over the draft vocabulary, descending;
        [R, ..., B] int64, target ids; [R, ...] int64, the predicted rank bucket.
    """
    normed, logits, offset, rank_head, width, scope, beta = given
    top, features = top_and_features(logits, width, scope)
    index = top.indices[..., :width]
    rank_logits = rank_head(torch.cat([normed, features.to(normed.dtype)], dim=-1))
    best = top.values[..., :width]
    return top_logprobs(logits, best, beta), index + offset[index], rank_logits.argmax(-1)


@jit
def _merge_and_rank_kernel(
    chunks,  # Chunks
    offset_ptr,  # [vocab] int64
    of_state_ptr,  # [rows, HIDDEN]: the rank head's first layer over the state
    first_ptr,  # [HIDDEN, size + LOGPROBS + 5]
    first_stride,
    second_ptr,  # [CLASSES, HIDDEN]
    logprob_ptr,  # [rows, WIDTH] fp32
    token_ptr,  # [rows, WIDTH] int64
    bucket_ptr,  # [rows] int64
    size,
    MERGE: tl.constexpr,  # MergeConstants
    WIDTH: tl.constexpr,
    SCOPE: tl.constexpr,  # logits that the rank features are taken over; 0: the whole vocabulary
    HIDDEN: tl.constexpr,
    CLASSES: tl.constexpr,
    LOGPROBS: tl.constexpr = FEATURE_LOGPROBS,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    values, most, lower, weight, total = merge_chunks(
        chunks, offset_ptr, logprob_ptr, token_ptr, row, MERGE, WIDTH
    )
    rank = tl.arange(0, MERGE.TOP)
    if SCOPE == 0:
        chunk = tl.arange(0, next_power_of_2(MERGE.CHUNKS))
        spread = chunks.sums + (row * 4 + 2) * MERGE.CHUNKS + chunk
        spread = tl.load(spread, mask=chunk < MERGE.CHUNKS, other=0.0)
        within = most + tl.log(total)
        entropy = tl.log(total) - tl.sum((spread + weight * lower) * tl.exp(lower), 0) / total
    else:
        below = values - most
        share = tl.where(rank < SCOPE, tl.exp(below), 0.0)
        mass = tl.sum(share, 0)
        within = most + tl.log(mass)
        entropy = tl.log(mass) - tl.sum(tl.where(rank < SCOPE, share * below, 0.0), 0) / mass
    # Log-probabilities, gaps to ranks 2, 3 and 5, probability of the first, entropy.
    feature = tl.arange(0, next_power_of_2(LOGPROBS + 5))
    behind = feature - LOGPROBS
    source = tl.where(behind < 0, feature, tl.where(behind == 2, 4, behind + 1))
    value = tl.gather(values, tl.where(behind > 2, 0, source), 0)
    psi = tl.where(behind < 0, value - within, most - value)
    psi = tl.where(behind == 3, tl.exp(value - within), psi)
    psi = tl.where(behind == 4, entropy, psi)
    # Rounded to the dtype in which the rank head was trained to read them.
    psi = psi.to(of_state_ptr.dtype.element_ty).to(tl.float32)

    hidden = tl.arange(0, next_power_of_2(HIDDEN))
    real = hidden < HIDDEN
    tile = tl.load(
        first_ptr + hidden[:, None] * first_stride + size + feature[None, :],
        mask=real[:, None] & (feature < LOGPROBS + 5)[None, :],
        other=0.0,
    ).to(tl.float32)
    state = tl.load(of_state_ptr + row * HIDDEN + hidden, mask=real, other=0.0).to(tl.float32)
    state += tl.sum(tile * tl.where(behind < 5, psi, 0.0)[None, :], 1)
    state = state / (1 + tl.exp(-state))  # SiLU
    kind = tl.arange(0, next_power_of_2(CLASSES))
    tile = tl.load(
        second_ptr + kind[:, None] * HIDDEN + hidden[None, :],
        mask=(kind < CLASSES)[:, None] & real[None, :],
        other=0.0,
    ).to(tl.float32)
    score = tl.where(kind < CLASSES, tl.sum(tile * state[None, :], 1), float("-inf"))
    tl.store(bucket_ptr + row, tl.argmax(score, 0).to(tl.int64))
