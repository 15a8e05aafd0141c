"""Survival probabilities of new trees' nodes, for CPUs; see `write_survival.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit
from .write_survival import Later, SeenNodes


def write_survival_numba(
    req_idx: torch.Tensor,
    score: torch.Tensor,
    temperature: torch.Tensor,
    seen: SeenNodes,
    steps: torch.Tensor,
    later: Later,
) -> None:
    """Write `steps`; arguments as in `write_survival_triton`."""
    given = (x.numpy() for x in (req_idx.long(), score, temperature, steps, *seen[:3], *later[:2]))
    _steps(*given, *seen[3:], *later[2:])


@njit
def _fit(judged, reached, believed, prior, rates):
    """Isotonic regression into rates [bins] by pooling violators."""
    num_bins = len(believed)
    count, found = np.empty(num_bins), np.empty(num_bins)
    last = np.empty(num_bins, np.int64)  # of each pool
    pools = 0
    for place in range(num_bins):
        count[pools] = judged[place] + prior
        found[pools] = reached[place] + prior * believed[place]
        while pools and found[pools - 1] * count[pools] < found[pools] * count[pools - 1]:
            pools -= 1
            count[pools] += count[pools + 1]
            found[pools] += found[pools + 1]
        last[pools] = place
        pools += 1
    first = 0
    for pool in range(pools):
        rates[first : last[pool] + 1] = found[pool] / count[pool]
        first = last[pool] + 1


@njit
def _steps(
    req_idx,  # [R] int64
    score,  # [S, N] fp32
    temperature,  # [R] fp32
    steps,  # [≥ R, N] fp32; the first R rows are written
    judged,  # [2, bins] fp32
    reached,  # [2, bins] fp32
    believed,  # [bins] fp32
    depth,  # [S, N+1] int64
    origin,  # [S, N] uint8
    prior,
    bins_per_nat,
    first,  # depth of the first block
    others,  # bits of drafters without blocks
):
    num_bins, bits = len(believed), steps.view(np.int32)
    rates = np.empty((2, num_bins))
    fitted = np.zeros(2, np.bool_)
    for request in range(len(req_idx)):
        at, kind = req_idx[request], 1 if temperature[request] > 0 else 0
        if not fitted[kind]:
            _fit(judged[kind], reached[kind], believed, prior, rates[kind])
            fitted[kind] = True
        lowest, before = 2.0, 1.0
        for node in range(score.shape[1]):
            logprob = score[at, node]
            survival = 0.0
            if np.isfinite(logprob):
                # Between bin centres.
                place = min(max(-bins_per_nat * logprob, 0.0), num_bins - 1e-3) - 0.5
                place = min(max(place, 0.0), num_bins - 1.0)
                below = int(place)
                above = min(below + 1, num_bins - 1)
                share = place - below
                likely = (1 - share) * rates[kind, below] + share * rates[kind, above]
                lowest = survival = min(lowest, likely)
            steps[request, node] = survival / before if before > 0 else 0.0
            before = survival
            bits[request, node] &= -2
            deep = depth[at, node + 1] > first and origin[at, node] & others == 0
            if deep and bits[request, node] > 0:
                bits[request, node] -= 1
