"""Which drafts of a batch are verified, for CPUs; see `reallocate_drafts.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit

_F = np.float32


def reallocate_drafts_numba(
    confidence: torch.Tensor,
    req_idx: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    num_bonus: int,
    logit_start: torch.Tensor,
    row_start: torch.Tensor,
) -> None:
    """Arguments as `reallocate_drafts_triton` has them."""
    _reallocate(
        confidence.numpy(),
        req_idx.numpy(),
        counts.numpy(),
        budget,
        num_bonus,
        logit_start.numpy(),
        row_start.numpy(),
    )


@njit
def _reallocate(
    confidence,  # [S, N] fp32
    req_idx,  # [R] integers
    counts,  # [2, R] int32
    budget,
    num_bonus,
    logit_start,  # [≥ R + 1] int32, written
    row_start,  # [≥ R + 1] int32, written
):
    num_requests, num_drafts = len(req_idx), 0
    for request in range(num_requests):
        num_drafts += counts[0, request]
    survival = np.empty(num_drafts, _F)
    index = 0
    for request in range(num_requests):
        product = 1.0
        for draft in range(counts[0, request]):
            product *= confidence[req_idx[request], draft]
            # The bounds are for values that are no probability: they get budget, too.
            survival[index] = min(max(product, 0.0), 1.0) if product == product else 0.0
            index += 1
    least, ties = _F(-1), 0
    if 0 < budget < num_drafts:
        least = np.sort(survival)[num_drafts - budget]
        # Of those as likely as the last that is admitted, the first ones are.
        ties = budget - np.sum(survival > least)
    logit_start[0] = row_start[0] = 0
    index = 0
    for request in range(num_requests):
        admitted = 0
        for _ in range(counts[0, request] if budget else 0):
            if survival[index] > least:
                admitted += 1
            elif survival[index] == least and ties > 0:
                admitted += 1
                ties -= 1
            index += 1
        logit_start[request + 1] = logit_start[request] + admitted + num_bonus
        row_start[request + 1] = row_start[request] + admitted + counts[1, request]
    row_start[num_requests + 1 :] = row_start[num_requests]
