"""Best logits of a row by chunks: the first launch, and the merge for a second one.

Chunks of the vocabulary keep all SMs busy for a few rows. Ties go to the lower index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import cdiv, jit, next_power_of_2, tl


class Chunks(NamedTuple):
    """Results of the first kernel per chunk."""

    best: torch.Tensor  # [rows, chunks, TOP] int64: an ordered integer << 32 | (2^31 - 1 - index)
    # [rows, 4, chunks] fp32: m = max x, and for d = x - m Σ e^d, Σ d e^d, Σ e^βd.
    sums: torch.Tensor
    beta: torch.Tensor | None  # [rows / rows_each] fp32, β; None: 1
    rows_each: int


class MergeConstants(NamedTuple):
    """Compile-time constants of `merge_chunks`."""

    CHUNKS: int
    TOP: int  # best of a chunk


def best_of_chunks(
    logits: torch.Tensor,
    most: int,
    beta: torch.Tensor | None,
    *,
    spread: bool = False,
    scale: float = 1.0,
) -> tuple[Chunks, MergeConstants]:
    """Launch the first kernel.

    Args:
        logits: [R, ..., Vd], of any floating dtype.
        most: number of best logits per row, at most Vd.
        beta: [R] fp32, or None.
        spread: also compute the entropy over the whole vocabulary.
        scale: factor on the logits, above 0.
    """
    vocab = logits.shape[-1]
    logits = logits.detach().reshape(-1, vocab).contiguous()
    rows = len(logits)
    top = max(2, next_power_of_2(most))  # a top-k of 1 does not compile with Triton 3.6
    # At most 32 chunks, so that one program can merge them; no smaller than a program is worth.
    chunk = max(top, min(next_power_of_2(vocab), 1024), next_power_of_2(cdiv(vocab, 32)))
    chunks = cdiv(vocab, chunk)
    best = torch.empty(rows, chunks, top, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, 4, chunks, dtype=torch.float32, device=logits.device)
    found = Chunks(best, sums, beta, 1 if beta is None or not rows else rows // len(beta))
    _best_of_chunk_kernel[(rows, chunks)](
        logits,
        found,
        vocab,
        scale,
        CHUNK=chunk,
        TOP=top,
        SPREAD=spread,
        num_warps=4 if chunk <= 1024 else 8,
    )
    return found, MergeConstants(chunks, top)


def top_logprobs(
    logits: torch.Tensor, best: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """Return log softmax(β · logits [R, ..., Vd]) at `best` of them, [R, ..., B] float32.

    beta: [R] fp32, β; None: 1.
    """
    logits, best = logits.float(), best.float()
    if beta is not None:
        factor = beta.view(-1, *[1] * (logits.dim() - 1))
        logits, best = logits * factor, best * factor
    return best - logits.logsumexp(-1, keepdim=True)


@jit
def _best_of_chunk_kernel(
    logits_ptr,  # [rows, vocab]
    out,  # Chunks
    vocab,
    scale,  # of x = scale * logit
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    SPREAD: tl.constexpr,  # whether the sum of d e^d is wanted
):
    """One chunk of one row."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sums_ptr = out.sums + row * 4 * chunks + chunk
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab
    x = tl.load(logits_ptr + row * vocab + index, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) * scale

    largest = tl.max(x, 0)
    below = tl.where(inside, x - largest, 0.0)
    weight = tl.where(inside, tl.exp(below), 0.0)
    tl.store(sums_ptr, largest)
    tl.store(sums_ptr + chunks, tl.sum(weight, 0))
    if SPREAD:
        tl.store(sums_ptr + 2 * chunks, tl.sum(weight * below, 0))
    if out.beta is not None:
        sharp = tl.load(out.beta + row // out.rows_each)
        sharper = tl.where(inside, tl.exp(sharp * below), 0.0)
        tl.store(sums_ptr + 3 * chunks, tl.sum(sharper, 0))

    # A NaN may order below −inf, and so after padding.
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    # Negative floats order against their bits.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = (ordered << 32) | (0x7FFFFFFF - index).to(tl.int64)
    tl.store(out.best + (row * chunks + chunk) * TOP + tl.arange(0, TOP), tl.topk(keys, TOP))


@jit
def merge_chunks(
    chunks,  # Chunks
    offset_ptr,  # [vocab] int64; None: none is added to the index
    logprob_ptr,  # [rows, WIDTH] fp32
    token_ptr,  # [rows, WIDTH] int64
    row,  # int64
    MERGE: tl.constexpr,  # MergeConstants
    WIDTH: tl.constexpr,
):
    """Write one row's best tokens.

    Returns its TOP best x, the largest, per chunk how far its own largest is below that and its
    sum of e^d, and the row's sum of e^(x - largest).
    """
    KEYS: tl.constexpr = MERGE.CHUNKS * MERGE.TOP
    nothing: tl.constexpr = -0x8000000000000000
    place = tl.arange(0, next_power_of_2(KEYS))
    keys = tl.load(chunks.best + row * KEYS + place, mask=place < KEYS, other=nothing)
    keys = tl.topk(keys, MERGE.TOP)
    ordered = (keys >> 32).to(tl.int32)
    values = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    index = 0x7FFFFFFF - (keys & 0x7FFFFFFF)

    chunk = tl.arange(0, next_power_of_2(MERGE.CHUNKS))
    at = chunks.sums + row * 4 * MERGE.CHUNKS + chunk
    largest = tl.load(at, mask=chunk < MERGE.CHUNKS, other=float("-inf"))
    weight = tl.load(at + MERGE.CHUNKS, mask=chunk < MERGE.CHUNKS, other=0.0)
    most = tl.max(largest, 0)
    lower = tl.where(chunk < MERGE.CHUNKS, largest - most, 0.0)
    total = tl.sum(weight * tl.exp(lower), 0)
    if chunks.beta is None:
        scores = values - (most + tl.log(total))
    else:
        sharp = tl.load(chunks.beta + row // chunks.rows_each)
        sharper = tl.load(at + 3 * MERGE.CHUNKS, mask=chunk < MERGE.CHUNKS, other=0.0)
        sharper = tl.sum(sharper * tl.exp(sharp * lower), 0)
        scores = sharp * (values - most) - tl.log(sharper)
    rank = tl.arange(0, MERGE.TOP)
    out = row * WIDTH + rank
    tl.store(logprob_ptr + out, scores, mask=rank < WIDTH)
    offset = 0 if offset_ptr is None else tl.load(offset_ptr + index, mask=rank < WIDTH, other=0)
    tl.store(token_ptr + out, index + offset, mask=rank < WIDTH)
    return values, most, lower, weight, total
