"""Verdicts on nodes by score, and survival probabilities of new nodes, for CPUs.

See `write_survival.py` and `vllm_specblock.feedback.acceptance_estimator`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..op import views
from ..optional_numba import njit
from .write_survival import Later, SeenNodes

BINS_PER_NAT = 4
"""A bin spans a quarter nat; the last one also holds all lower scores."""


def learn_scores_numba(seen: torch.Tensor, verified: Any, decay: float) -> None:
    """Add the verdicts to `seen`; arguments as in `learn_scores`."""
    _learn(*views([seen, *verified]), np.float32(decay))


@njit
def _learn(seen, req_idx, num_run, accepted, path, score, origin, temperature, decay):
    new = np.zeros_like(seen)
    bins, found = np.empty(score.shape[1] + 1, np.int64), False
    for request in range(len(req_idx)):
        at = req_idx[request]
        kind = 1 if temperature[at] > 0 else 0
        bins[:] = -1
        for node in range(min(num_run[request], score.shape[1])):
            if origin[at, node] > 0 and score[at, node] > -np.inf:
                place = max(-BINS_PER_NAT * score[at, node], 0.0)
                bins[node + 1] = int(min(place, seen.shape[2] - 1e-3))
                new[0, kind, bins[node + 1]] += 1
                found = True
        for place in range(1, accepted[request] + 1):
            if bins[path[request, place]] >= 0:
                new[1, kind, bins[path[request, place]]] += 1
    if found:
        seen *= decay
        seen += new


def write_survival_numba(
    req_idx: torch.Tensor,
    score: torch.Tensor,
    temperature: torch.Tensor,
    seen: SeenNodes,
    steps: torch.Tensor,
    later: Later,
) -> None:
    """Write `steps`; arguments as in `write_survival_triton`."""
    _steps(*views([req_idx.long(), score, temperature, steps]), views(seen), views(later))


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
    seen,
    later,
):
    believed, bins_per_nat = seen.believed, seen.bins_per_nat
    num_bins, bits = len(believed), steps.view(np.int32)
    rates = np.empty((2, num_bins))
    fitted = np.zeros(2, np.bool_)
    for request in range(len(req_idx)):
        at, kind = req_idx[request], 1 if temperature[request] > 0 else 0
        if not fitted[kind]:
            _fit(seen.judged[kind], seen.reached[kind], believed, seen.prior, rates[kind])
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
            deep = later.depth[at, node + 1] > later.first
            if deep and later.origin[at, node] & later.others == 0 and bits[request, node] > 0:
                bits[request, node] -= 1
