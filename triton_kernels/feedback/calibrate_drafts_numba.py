"""Draft calibration, for CPUs; see `calibrate_drafts.py`."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..optional_numba import njit
from ..verify.verification_result import VerificationResult

_F = np.float32


def update_calibration_numba(
    log: torch.Tensor,
    trees: torch.Tensor,
    drafter: int,
    result: VerificationResult,
    limits: tuple[float, float],
    prior: float,
    memory: float,
    own: torch.Tensor,
    own_trees: torch.Tensor,
    own_range: float,
    own_prior: float,
    own_memory: float,
) -> None:
    """Arguments as `update_calibration_triton` has them."""
    _learn(
        log.numpy(),
        trees.numpy(),
        1 << drafter,
        *result.on_host(),
        *limits,
        prior,
        memory,
        own.numpy(),
        own_trees.numpy(),
        math.log(own_range),
        own_prior,
        own_memory,
    )


@njit
def _learn(
    log,  # [2] fp32
    trees,  # [2] fp32
    bit,
    req_idx,  # [R] int64
    num_run,  # [R] int64
    accepted,  # [R] int64
    path,  # [R, D+1] int64
    score,  # [S, N] fp32
    origin,  # [S, N] uint8
    temperatures,  # [S] fp32
    lowest,
    highest,
    prior,
    memory,
    own,  # [S] fp32, or [0]
    own_trees,  # [S] fp32, or [0]
    own_most,
    own_prior,
    own_memory,
):
    num_nodes = score.shape[1]
    greedy, sampling = math.exp(log[0]), math.exp(log[1])
    pull, count = np.zeros(2), np.zeros(2)
    for request in range(len(req_idx)):
        at, run = req_idx[request], min(num_run[request], num_nodes)
        expected, kept, counts = 0.0, 0, False
        for node in range(run):
            if origin[at, node] & bit:
                expected += math.exp(score[at, node])
                counts = True
        if not counts:
            continue
        for place in range(1, min(accepted[request], path.shape[1] - 1) + 1):
            node = path[request, place]
            if 0 < node <= run and origin[at, node - 1] & bit:
                kept += 1
        error = (kept - expected) / (1 + expected)
        if len(own):
            own_trees[at] = min(own_trees[at] + 1, own_memory)
            moved = own[at] + error / (own_prior + own_trees[at])
            own[at] = min(max(moved, -own_most), own_most)
        which = 0 if greedy * temperatures[at] <= sampling else 1
        pull[which] += error
        count[which] += 1
    for which in range(2):
        trees[which] = min(trees[which] + _F(count[which]), memory)
        moved = log[which] + pull[which] / (prior + trees[which])
        log[which] = min(max(moved, lowest), highest)
