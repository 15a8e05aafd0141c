"""Counts over the trees of a step, for CPUs; see `count_nodes.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..optional_numba import njit
from ..verify.verification_result import VerificationResult


def count_verified_numba(total: torch.Tensor, result: VerificationResult) -> None:
    """Arguments as `count_verified_triton` has them."""
    given = (result.req_idx, result.num_run, result.path)
    _verified(total.numpy(), result.origin.numpy(), *(x.contiguous().numpy() for x in given))


@njit
def _verified(
    total,  # [3, 3] int64
    origin,  # [S, N] uint8
    req_idx,  # [R] integers
    num_run,  # [R] integers
    path,  # [R, D+1] int64
):
    for request in range(len(req_idx)):
        run, at = min(num_run[request], origin.shape[1]), req_idx[request]
        for node in range(run):
            kind = origin[at, node]
            if kind:
                total[kind - 1, 0] += 1
        for node in path[request]:
            if 0 < node <= run and origin[at, node - 1]:
                total[origin[at, node - 1] - 1, 1] += 1
        if run > 0 and origin[at, 0]:
            total[origin[at, 0] - 1, 2] += 1


def count_drafted_numba(
    total: torch.Tensor,
    sizes: Sequence[torch.Tensor],
    second: torch.Tensor | None,
    agreed: torch.Tensor | None,
    live: torch.Tensor,
    betas: Sequence[torch.Tensor | None],
) -> None:
    """Arguments as `count_drafted_triton` has them."""
    two = None if second is None or agreed is None else (second, agreed)
    given = (sizes[0], sizes[-1], *(two or (live, live)), live)
    beta = (_ONE if x is None else x for x in (betas[0], betas[-1]))
    counted = (x.contiguous().numpy() for x in (*given, *beta))
    _drafted(total.numpy(), *counted, len(sizes), two is not None)


_ONE = torch.empty(0)
"""Of a drafter that has no β."""


@njit
def _thousandths(
    beta,  # [R] fp32, or [0]: 1
    request,
):
    return np.int64(beta[request] * np.float32(1000) + np.float32(0.5)) if len(beta) else 1000


@njit
def _drafted(
    total,  # [3 · heads + 4] int64
    first,  # [R] int32
    other,  # [R] int32
    second,  # [R] bool
    agreed,  # [R] bool
    live,  # [R] bool
    first_beta,  # [R] fp32, or [0]: 1
    other_beta,  # [R] fp32, or [0]: 1
    heads,
    two,  # a second drafter can be asked
):
    for request in range(len(live)):
        if not live[request]:
            continue
        drafted = first[request] > 0
        total[0] += first[request]
        total[heads + 2] += drafted
        if drafted:
            total[2 * heads + 4] += _thousandths(first_beta, request)
        if heads == 2:
            total[1] += other[request]
            total[heads + 3] += other[request] > 0
            if other[request] > 0:
                total[2 * heads + 5] += _thousandths(other_beta, request)
            drafted = drafted and other[request] > 0
        if two:
            total[heads] += second[request]
            total[heads + 1] += agreed[request]
        total[2 * heads + 2] += drafted
        total[2 * heads + 3] += 1
