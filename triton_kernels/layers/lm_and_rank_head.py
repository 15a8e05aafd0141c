"""Top-k tokens, log-probabilities, rank features and rank MLP from draft logits: two launches.

The first launch finds the best of every chunk of a row (`best_of_chunks.py`); the second one, a
program per row, merges them and feeds the rank head. `topk_tokens.py` merges the same chunks where
there is no rank head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..optional_numba import takes
from ..optional_triton import jit, next_power_of_2, tl
from .best_of_chunks import best_of_chunks, merge_chunks
from .lm_and_rank_head_numba import lm_and_rank_head_numba
from .lm_and_rank_head_reference import FEATURE_LOGPROBS, lm_and_rank_head_reference


def lm_and_rank_head(
    normed: torch.Tensor,
    logits: torch.Tensor,
    offset: torch.Tensor,
    rank_head: nn.Sequential,
    width: int,
    scope: int | None,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What tree expansion needs of positions. CUDA tensors go to the kernels; no gradient there.

    Args:
        normed: [R, ..., H], what the LM head read.
        logits: [R, ..., Vd], what it said; Vd at least 10.
        offset: [Vd] int64, target id − draft id.
        rank_head: linear [hidden, H + 15], SiLU, linear [classes, hidden]; no biases.
        width: B, tokens per position, at most Vd.
        scope: logits over which the rank features are taken, at least 10; None: all.
        beta: [R] fp32, above 0: what the logits are multiplied by before they become
            probabilities; the rank head never sees it. None: 1.

    Returns:
        [R, ..., B] float32, log-probabilities over the draft vocabulary, descending;
        [R, ..., B] int64, target ids; [R, ...] int64, the predicted rank bucket.
    """
    if logits.is_cuda:
        read = lm_and_rank_head_triton
    else:
        learns = torch.is_grad_enabled() and (normed.requires_grad or logits.requires_grad)
        compiled = takes(logits) and not learns and width <= logits.shape[-1]
        read = lm_and_rank_head_numba if compiled else lm_and_rank_head_reference
    return read(normed, logits, offset, rank_head, width, scope, beta)


def lm_and_rank_head_triton(
    normed: torch.Tensor,
    logits: torch.Tensor,
    offset: torch.Tensor,
    rank_head: nn.Sequential,
    width: int,
    scope: int | None,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernels; arguments and results as `lm_and_rank_head` has them.

    The rank head's product with `normed` is torch's; the features' part is added to it, so the
    two are never laid side by side.
    """
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    size = normed.shape[-1]
    layers: Any = rank_head  # torch knows no types of what it lists
    first, second = layers[0].weight.detach(), layers[2].weight.detach().contiguous()
    of_state = F.linear(normed, first[:, :size]).reshape(-1, len(first)).contiguous()
    most = min(max(scope or FEATURE_LOGPROBS, width), vocab)
    chunks, constants = best_of_chunks(logits, most, beta, spread=scope is None)
    rows, device = len(of_state), logits.device
    logprob = torch.empty(rows, width, dtype=torch.float32, device=device)
    token = torch.empty(rows, width, dtype=torch.int64, device=device)
    bucket = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        _merge_and_rank_kernel[(rows,)](
            *chunks,
            offset,
            of_state,
            first,
            first.stride(0),
            second,
            logprob,
            token,
            bucket,
            size,
            SCOPE=0 if scope is None else min(scope, most),
            WIDTH=width,
            LOGPROBS=FEATURE_LOGPROBS,
            FEATURES=next_power_of_2(FEATURE_LOGPROBS + 5),
            HIDDEN=len(first),
            HIDDEN_PLACES=next_power_of_2(len(first)),
            CLASSES=len(second),
            CLASS_PLACES=next_power_of_2(len(second)),
            MERGE=constants,
            num_warps=4,
        )
    return logprob.view(*lead, width), token.view(*lead, width), bucket.view(lead)


@jit(do_not_specialize=["num_chunks", "rows_each"])
def _merge_and_rank_kernel(
    best,  # as `best_of_chunks` leaves them, down to `rows_each`
    sums,
    num_chunks,
    beta,
    rows_each,
    offset,  # [vocab] int64
    of_state,  # [rows, HIDDEN]: the rank head's first layer over the state
    first,  # [HIDDEN, size + LOGPROBS + 5]
    first_stride,
    second,  # [CLASSES, HIDDEN]
    logprob,  # [rows, WIDTH] fp32
    token,  # [rows, WIDTH] int64
    bucket,  # [rows] int64
    size,
    MERGE: tl.constexpr,  # MergeConstants
    SCOPE: tl.constexpr,
    WIDTH: tl.constexpr,
    LOGPROBS: tl.constexpr,
    FEATURES: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_PLACES: tl.constexpr,
    CLASSES: tl.constexpr,
    CLASS_PLACES: tl.constexpr,
):
    """One row. SCOPE 0: the rank features are taken over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    values, most, lower, weight, total = merge_chunks(
        best,
        sums,
        num_chunks,
        beta,
        rows_each,
        offset,
        logprob,
        token,
        row,
        MERGE,
        WIDTH,
    )
    rank = tl.arange(0, MERGE.TOP)
    if SCOPE == 0:
        chunk = tl.arange(0, MERGE.CHUNK_PLACES)
        spread = sums + 2 * num_chunks + row * MERGE.CHUNKS + chunk
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
    feature = tl.arange(0, FEATURES)
    behind = feature - LOGPROBS
    source = tl.where(behind < 0, feature, tl.where(behind == 2, 4, behind + 1))
    value = tl.gather(values, tl.where(behind > 2, 0, source), 0)
    psi = tl.where(behind < 0, value - within, most - value)
    psi = tl.where(behind == 3, tl.exp(value - within), psi)
    psi = tl.where(behind == 4, entropy, psi)
    # Rounded to the dtype in which the rank head was trained to read them.
    psi = psi.to(of_state.dtype.element_ty).to(tl.float32)

    hidden = tl.arange(0, HIDDEN_PLACES)
    real = hidden < HIDDEN
    tile = tl.load(
        first + hidden[:, None] * first_stride + size + feature[None, :],
        mask=real[:, None] & (feature < LOGPROBS + 5)[None, :],
        other=0.0,
    ).to(tl.float32)
    state = tl.load(of_state + row * HIDDEN + hidden, mask=real, other=0.0).to(tl.float32)
    state += tl.sum(tile * tl.where(behind < 5, psi, 0.0)[None, :], 1)
    state = state / (1 + tl.exp(-state))  # SiLU
    kind = tl.arange(0, CLASS_PLACES)
    tile = tl.load(
        second + kind[:, None] * HIDDEN + hidden[None, :],
        mask=(kind < CLASSES)[:, None] & real[None, :],
        other=0.0,
    ).to(tl.float32)
    score = tl.where(kind < CLASSES, tl.sum(tile * state[None, :], 1), float("-inf"))
    tl.store(bucket + row, tl.argmax(score, 0).to(tl.int64))
