"""Gumbel sampling: the largest logit of a row, plus vLLM's noise at T > 0.

The noise of a token takes a hash and two logarithms, but only a few tokens can win. The loop
bounds each token's noise by the leading bits of its hash, and computes it only if the bound
exceeds the best score so far. The sampled tokens are the same.

In a tree, only rows on the accepted path are drawn (`drawn_along`), or processed and drawn
(`sample_by_depth`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_specblock.cpu.kernels import replaces_kernel
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import load_scores
from vllm_specblock.triton_kernels.optional_numba import njit

Array = npt.NDArray[Any]

DRAFT_SALT = 1 << 30
_CHUNK = 1024  # tokens whose scores stay in the first cache

_U, _F = np.uint32, np.float32
_FAST = {"nnan", "nsz", "contract"}
_LN2 = 0.6931471805599453
# The bits of an fp32 x, as an integer, are at most 2^23 · (log2(x) + 127).
_BITS_TO_NATS, _MOST_NOISE = _LN2 / (1 << 23), (127 + 31) * _LN2
# Rounding error of a bound in nats, plus a thousandth of it per unit of the score.
_SLACK = 1e-3

_trees: tuple[Array, ...] | None = None  # token, first row, slot, parent of `drawn_along`


@contextmanager
def drawn_along(
    token: Tensor, first_row: Tensor, req_idx: Tensor, parent: Tensor
) -> Iterator[None]:
    """Draw tokens only for rows on the accepted path within this context; −1 for the others.

    token, first_row, req_idx: as in `DrawnRows`; parent: [S, N] int32.
    """
    global _trees
    given = token.long(), first_row.int(), req_idx.long(), parent.int()
    _trees = tuple(x.contiguous().numpy() for x in given)
    try:
        yield
    finally:
        _trees = None


def sample_by_depth(
    sample: Callable[[Tensor], Tensor],
    token: Tensor,
    first_row: Tensor,
    req_idx: Tensor,
    parent: Tensor,
) -> Tensor:
    """Sample the roots, then level by level the nodes whose token their parent drew.

    Returns [rows] int64, −1 for the others. sample: rows [n] int64 → their tokens [n] int64; the
    rest as in `drawn_along`.
    """
    trees = [x.contiguous().numpy() for x in (token, first_row, req_idx, parent)]
    drawn = torch.full(token.shape, -1)
    rows = first_row[:-1].long()
    while len(rows):
        drawn[rows] = sample(rows)
        rows = torch.from_numpy(_drawn_children(*trees, drawn.numpy()))
    return drawn


@njit
def _drawn_children(
    draft: Array, first_row: Array, owner: Array, parent: Array, drawn: Array
) -> Array:
    """Return rows [n] int64 without a draw whose parent drew their token; as in `_draw`."""
    rows, count = np.empty(len(drawn), np.int64), 0
    for request in range(len(owner)):
        first = first_row[request]
        for node in range(min(first_row[request + 1] - first - 1, parent.shape[1])):
            row, above = first + 1 + node, parent[owner[request], node]
            wanted = draft[row] >= 0 and above >= 0 and drawn[row] < 0
            if wanted and drawn[first + above] == draft[row]:
                rows[count] = row
                count += 1
    return rows[:count]


@replaces_kernel("gpu.sample.gumbel._gumbel_sample_kernel")
def gumbel_sample(
    local_argmax: Tensor, local_max: Tensor, logits_cache: Tensor | None, logits: Tensor,
    expanded_idx_mapping: Tensor, seeds: Tensor, pos: Tensor, temp: Tensor, vocab_size: int,
    IS_DRAFTING: bool, APPLY_TEMPERATURE: bool, USE_FP64: bool,
) -> None:  # fmt: skip
    """vLLM reduces over blocks afterwards; the first block gets the row's best."""
    if logits_cache is not None or USE_FP64:
        raise NotImplementedError("Cached draft logits and fp64 noise are unsupported on a CPU.")
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    rows, stride = len(logits), logits.stride(0)
    flat = logits.as_strided(((rows - 1) * stride + vocab_size,), (1,)) if rows else logits[:, 0]
    bits = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
    local_max.fill_(float("-inf"))
    trees = _trees
    if trees is None:  # each row is a root
        none = np.zeros(rows, np.int64)
        trees = none, np.arange(rows + 1, dtype=np.int32), none, np.empty((1, 1), np.int32)
    _draw(
        *trees, bits.numpy(), stride, vocab_size, expanded_idx_mapping.long().numpy(), temp.numpy(),
        seeds.numpy(), pos.long().numpy(), DRAFT_SALT if IS_DRAFTING else 0, APPLY_TEMPERATURE,
        local_argmax.numpy(), local_max.numpy(),
    )  # fmt: skip


@njit
def _mix(state: np.uint32, key: np.uint32) -> np.uint32:
    """One murmur3 round."""
    key = _U(key * _U(0xCC9E2D51))
    key = _U(_U(key << _U(15)) | _U(key >> _U(17)))
    state = _U(state ^ _U(key * _U(0x1B873593)))
    state = _U(_U(state << _U(13)) | _U(state >> _U(19)))
    return _U(_U(state * _U(5)) + _U(0xE6546B64))


@njit
def _hash(state: np.uint32, token: np.uint32) -> np.uint32:
    """Return 32 random bits for a token."""
    bits = _U(_mix(state, token) ^ _U(16))
    bits = _U(_U(bits ^ _U(bits >> _U(16))) * _U(0x85EBCA6B))
    bits = _U(_U(bits ^ _U(bits >> _U(13))) * _U(0xC2B2AE35))
    return _U(bits ^ _U(bits >> _U(16)))


@njit
def noise_of(bits: np.uint32) -> np.float32:
    """Return vLLM's fp32 noise, computed step by step as in its kernel."""
    low = _F(_F(bits & _U(0xFFFF)) + _F(0.5)) * _F(2.0**-32)
    uniform = _F(_F(bits >> _U(16)) * _F(2.0**-16) + low)
    if uniform < _F(0.25):
        series: float | np.float32 = _F(1 / 8)
        for order in range(7, 0, -1):
            series = _F(_F(1.0 / order) + _F(uniform * series))
        series = _F(-uniform * series)
    else:
        series = math.log(max(_F(_F(1) - uniform), _F(2.0**-24)))
    return _F(-math.log(_F(-series)))


@njit
def state_of(seed: int, position: int) -> np.uint32:
    """Return the hash state before a token is mixed in."""
    state = _mix(_U(0), _U(seed))
    state = _mix(state, _U(seed >> 32))
    return _mix(state, _U(position))


@njit
def _any_above(scores: Array, count: int, floor: np.float32) -> np.bool:
    """Return whether any score exceeds `floor`; counting vectorises."""
    above = np.int32(0)
    for i in range(count):
        above += np.int32(scores[i] > floor)
    return above > 0


@njit(fastmath=_FAST)
def _bound(scores: Array, count: int, state: np.uint32, start: int, bound: Array) -> None:
    """Bound the noisy scores: −log(−log(1 − u)) < −log(u), and u ≥ its leading 31 bits."""
    for i in range(count):
        bound[i] = _F(np.int32(_U(_hash(state, _U(start + i)) >> _U(1))))
    bits = bound.view(np.int32)
    for i in range(count):
        bound[i] = scores[i] + (_F(_MOST_NOISE) - _F(bits[i]) * _F(_BITS_TO_NATS))


@njit
def _below(best: np.float32) -> np.float32:
    """Return the value that a bound must exceed for its token to win."""
    return best - _F(_SLACK) * (_F(1) + _F(1e-3) * abs(best)) if best > -np.inf else best


@njit
def _draw(
    draft: Array,  # [rows] int64, a node's token; negative: not to be accepted
    first_row: Array,  # [R+1] int32
    owner: Array,  # [R] int64, the request slot
    parent: Array,  # [S, N] int32
    flat: Array,  # fp32, or int16 for bfloat16: rows of the vocabulary
    stride: int,
    vocab_size: int,
    req_idx: Array,  # [rows] int64; negative: no request
    temperature: Array,  # [slots] fp32, 0: the largest
    seed: Array,  # [slots] int64
    position: Array,  # [rows] int64
    salt: int,
    apply_temperature: bool,
    token: Array,  # [rows, blocks] int64, of which column 0 is written
    score: Array,  # [rows, blocks] fp32, as well
) -> None:
    """Draw the roots and the nodes whose token their parent drew; ties go to the lowest id."""
    scores, bound = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    token[:, 0] = -1
    for request in range(len(owner)):
        first, last = first_row[request], min(first_row[request + 1], len(req_idx))
        for row in range(first, last):
            node = row - first
            if node > 0:
                if node > parent.shape[1]:
                    break
                above = parent[owner[request], node - 1]
                # −1 (not drawn) matches no draft.
                if draft[row] < 0 or above < 0 or token[first + above, 0] != draft[row]:
                    continue
            at = req_idx[row]
            row_temperature = temperature[at] if at >= 0 else _F(0)
            state = state_of(seed[at], position[row] + salt) if at >= 0 else _U(0)
            best, chosen = _F(-np.inf), 0
            for start in range(0, vocab_size, _CHUNK):
                count = min(_CHUNK, vocab_size - start)
                load_scores(flat, row * stride + start, count, scores)
                if row_temperature == 0:
                    if _any_above(scores, count, best):
                        for i in range(count):
                            if scores[i] > best:
                                best, chosen = scores[i], start + i
                    continue
                if apply_temperature:
                    for i in range(count):
                        scores[i] = scores[i] / row_temperature
                _bound(scores, count, state, start, bound)
                floor = _below(best)
                if _any_above(bound, count, floor):
                    for i in range(count):
                        if bound[i] > floor:
                            now = _F(scores[i] + noise_of(_hash(state, _U(start + i))))
                            if now > best:
                                best, chosen = now, start + i
                                floor = _below(best)
            token[row, 0], score[row, 0] = chosen, best
