"""Acceptance estimator update, for CPUs; see `update_acceptance.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit
from ..verify.verification_result import VerificationResult

_F = np.float32


def update_acceptance_numba(
    judged: torch.Tensor,
    reached: torch.Tensor,
    result: VerificationResult,
    bins_per_nat: int,
    decay: float,
) -> None:
    """Arguments as `update_acceptance_triton` has them."""
    _learn(
        judged.numpy(),
        reached.numpy(),
        *result.on_host(),
        bins_per_nat,
        decay,
    )


@njit
def _learn(
    judged,  # [2, bins] fp32
    reached,  # [2, bins] fp32
    req_idx,  # [R] int64
    num_run,  # [R] int64
    accepted,  # [R] int64
    path,  # [R, D+1] int64
    score,  # [S, N] fp32
    origin,  # [S, N] uint8
    temperatures,  # [S] fp32
    bins_per_nat,
    decay,
):
    num_bins, num_nodes = judged.shape[1], score.shape[1]
    seen, kept = np.zeros(judged.shape, _F), np.zeros(judged.shape, _F)
    any_seen = False
    for request in range(len(req_idx)):
        at, run = req_idx[request], min(num_run[request], num_nodes)
        kind = 1 if temperatures[at] > 0 else 0
        on_path = np.zeros(num_nodes + 1, np.bool_)
        for place in range(min(accepted[request], path.shape[1] - 1) + 1):
            on_path[path[request, place]] = True
        for node in range(run):
            logprob = score[at, node]
            if origin[at, node] == 0 or not np.isfinite(logprob):
                continue
            nats = min(max(-_F(bins_per_nat) * logprob, _F(0)), _F(num_bins - 1e-3))
            any_seen = True
            seen[kind, int(nats)] += 1
            if on_path[node + 1]:
                kept[kind, int(nats)] += 1
    if any_seen:
        keep = _F(decay)
        for kind in range(2):
            for place in range(num_bins):
                judged[kind, place] = judged[kind, place] * keep + seen[kind, place]
                reached[kind, place] = reached[kind, place] * keep + kept[kind, place]
