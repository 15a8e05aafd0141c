"""Top-k tokens, log-probabilities, rank features and rank MLP from draft logits: two launches.

The draft vocabulary is cut into chunks, so that a few rows keep all SMs reading. The first launch
finds every chunk's best and its sums of exponentials; the second one, a program per row, merges
them and feeds the rank head. Of equal logits the one with the lower index comes first.
`topk_tokens.py` merges the same chunks where there is no rank head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..optional_numba import takes
from ..optional_triton import cdiv, jit, next_power_of_2, tl
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
            *chunks, offset, of_state, first, first.stride(0), second,
            logprob, token, bucket, size,
            SCOPE=0 if scope is None else min(scope, most), WIDTH=width,
            LOGPROBS=FEATURE_LOGPROBS, FEATURES=next_power_of_2(FEATURE_LOGPROBS + 5),
            HIDDEN=len(first), HIDDEN_PLACES=next_power_of_2(len(first)), CLASSES=len(second),
            CLASS_PLACES=next_power_of_2(len(second)), **constants, num_warps=4,
        )  # fmt: skip
    return logprob.view(*lead, width), token.view(*lead, width), bucket.view(lead)


def best_of_chunks(
    logits: torch.Tensor,
    most: int,
    beta: torch.Tensor | None,
    *,
    spread: bool = False,
    scale: float = 1.0,
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Launch the first kernel.

    Args:
        logits: [R, ..., Vd], of any floating dtype.
        most: how many of the best of a row are wanted, at most Vd.
        beta: [R] fp32, or None.
        spread: whether the entropy over the whole vocabulary is.
        scale: factor on the logits, above 0.

    Returns:
        the first arguments of a kernel that merges the chunks, and `merge_chunks`' compile-time
        ones but WIDTH.
    """
    vocab = logits.shape[-1]
    logits = logits.detach().reshape(-1, vocab).contiguous()
    rows = len(logits)
    top = max(2, next_power_of_2(most))  # a top-k of 1 does not compile with Triton 3.6
    # At most 32 chunks, so that one program can merge them; no smaller than a program is worth.
    chunk = max(top, min(next_power_of_2(vocab), 1024), next_power_of_2(cdiv(vocab, 32)))
    chunks = cdiv(vocab, chunk)
    best = torch.empty(rows, chunks, top, dtype=torch.int64, device=logits.device)
    sums = torch.empty(4, rows, chunks, dtype=torch.float32, device=logits.device)
    rows_each = 1 if beta is None or not rows else rows // len(beta)
    if rows:
        _best_of_chunk_kernel[(rows, chunks)](
            logits, best, sums, rows * chunks, vocab, beta, rows_each, scale,
            CHUNK=chunk, TOP=top, SPREAD=spread, num_warps=4 if chunk <= 1024 else 8,
        )  # fmt: skip
    constants = {
        "CHUNKS": chunks,
        "CHUNK_PLACES": next_power_of_2(chunks),
        "MERGED": next_power_of_2(chunks * top),
        "TOP": top,
    }
    return (best, sums, rows * chunks, beta, rows_each), constants


@jit(do_not_specialize=["num_chunks", "rows_each"])
def _best_of_chunk_kernel(
    logits,  # [rows, vocab]
    best,  # [rows, chunks, TOP] int64: x as an ordered integer << 32 | (2^31 - 1 - index)
    sums,  # [4, rows, chunks] fp32: m = max x, and with d = x - m the sums of e^d, d e^d, e^(bd)
    num_chunks,  # rows * chunks
    vocab,
    beta,  # [rows / rows_each] fp32, b; None: 1
    rows_each,
    scale,  # of x = scale * logit
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    SPREAD: tl.constexpr,  # whether the sum of d e^d is wanted
):
    """One chunk of one row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = row * tl.num_programs(1) + chunk
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab
    x = tl.load(logits + row * vocab + index, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) * scale

    largest = tl.max(x, 0)
    below = tl.where(inside, x - largest, 0.0)
    weight = tl.where(inside, tl.exp(below), 0.0)
    tl.store(sums + out, largest)
    tl.store(sums + num_chunks + out, tl.sum(weight, 0))
    if SPREAD:
        tl.store(sums + 2 * num_chunks + out, tl.sum(weight * below, 0))
    if beta is not None:
        sharp = tl.load(beta + row // rows_each)
        sharper = tl.where(inside, tl.exp(sharp * below), 0.0)
        tl.store(sums + 3 * num_chunks + out, tl.sum(sharper, 0))

    # A NaN may order below −inf, and then what lies beyond the vocabulary would come before it.
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    # Negative floats order against their bits.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = (ordered << 32) | (0x7FFFFFFF - index).to(tl.int64)
    tl.store(best + out * TOP + tl.arange(0, TOP), tl.topk(keys, TOP))


@jit
def merge_chunks(
    best, sums, num_chunks, beta, rows_each,  # as in the kernel above
    offset,  # [vocab] int64
    logprob,  # [rows, WIDTH] fp32
    token,  # [rows, WIDTH] int64
    row,  # int64
    CHUNKS: tl.constexpr, CHUNK_PLACES: tl.constexpr, MERGED: tl.constexpr, TOP: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one row's best tokens.

    Returns its TOP best x, the largest, per chunk how far its own largest is below that and its
    sum of e^d, and the row's sum of e^(x - largest).
    """
    place = tl.arange(0, MERGED)
    nothing: tl.constexpr = -0x8000000000000000
    keys = tl.load(best + row * (CHUNKS * TOP) + place, mask=place < CHUNKS * TOP, other=nothing)
    keys = tl.topk(keys, TOP)
    ordered = (keys >> 32).to(tl.int32)
    values = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    index = 0x7FFFFFFF - (keys & 0x7FFFFFFF)

    chunk = tl.arange(0, CHUNK_PLACES)
    at = sums + row * CHUNKS + chunk
    largest = tl.load(at, mask=chunk < CHUNKS, other=float("-inf"))
    weight = tl.load(at + num_chunks, mask=chunk < CHUNKS, other=0.0)
    most = tl.max(largest, 0)
    lower = tl.where(chunk < CHUNKS, largest - most, 0.0)
    total = tl.sum(weight * tl.exp(lower), 0)
    if beta is None:
        scores = values - (most + tl.log(total))
    else:
        sharp = tl.load(beta + row // rows_each)
        sharper = tl.load(at + 3 * num_chunks, mask=chunk < CHUNKS, other=0.0)
        sharper = tl.sum(sharper * tl.exp(sharp * lower), 0)
        scores = sharp * (values - most) - tl.log(sharper)
    rank = tl.arange(0, TOP)
    out = row * WIDTH + rank
    tl.store(logprob + out, scores, mask=rank < WIDTH)
    chosen = index + tl.load(offset + index, mask=rank < WIDTH, other=0)
    tl.store(token + out, chosen, mask=rank < WIDTH)
    return values, most, lower, weight, total


@jit(do_not_specialize=["num_chunks", "rows_each"])
def _merge_and_rank_kernel(
    best, sums, num_chunks, beta, rows_each,  # as in the other kernel
    offset,  # [vocab] int64
    of_state,  # [rows, HIDDEN]: the rank head's first layer over the state
    first,  # [HIDDEN, size + LOGPROBS + 5]
    first_stride,
    second,  # [CLASSES, HIDDEN]
    logprob,  # [rows, WIDTH] fp32
    token,  # [rows, WIDTH] int64
    bucket,  # [rows] int64
    size,
    CHUNKS: tl.constexpr, CHUNK_PLACES: tl.constexpr, MERGED: tl.constexpr, TOP: tl.constexpr,
    SCOPE: tl.constexpr, WIDTH: tl.constexpr, LOGPROBS: tl.constexpr,
    FEATURES: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_PLACES: tl.constexpr,
    CLASSES: tl.constexpr, CLASS_PLACES: tl.constexpr,
):  # fmt: skip
    """One row. SCOPE 0: the rank features are taken over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    values, most, lower, weight, total = merge_chunks(
        best, sums, num_chunks, beta, rows_each, offset, logprob, token, row,
        CHUNKS, CHUNK_PLACES, MERGED, TOP, WIDTH,
    )  # fmt: skip
    rank = tl.arange(0, TOP)
    if SCOPE == 0:
        chunk = tl.arange(0, CHUNK_PLACES)
        spread = sums + 2 * num_chunks + row * CHUNKS + chunk
        spread = tl.load(spread, mask=chunk < CHUNKS, other=0.0)
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
