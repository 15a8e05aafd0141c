"""What verdicts teach of a head's sharpness, and what it is, for CPUs; see `learn_sharpness.py`."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..optional_numba import njit
from ..verify.verdicts import Verdicts

_F = np.float32


def learn_sharpness_numba(
    log: torch.Tensor,
    trees: torch.Tensor,
    head: int,
    verdicts: Verdicts,
    limits: tuple[float, float],
    prior: float,
    memory: float,
    own: torch.Tensor,
    own_trees: torch.Tensor,
    own_range: float,
    own_prior: float,
    own_memory: float,
) -> None:
    """Arguments as `learn_sharpness_triton` has them."""
    _learn(
        log.numpy(), trees.numpy(), 1 << head, verdicts.slot.long().numpy(),
        verdicts.num_run.long().numpy(), verdicts.accepted.long().numpy(), verdicts.path.numpy(),
        verdicts.score.numpy(), verdicts.origin.numpy(), verdicts.heat.numpy(), *limits, prior,
        memory, own.numpy(), own_trees.numpy(), math.log(own_range), own_prior, own_memory,
    )  # fmt: skip


def sharpness_numba(
    log: torch.Tensor, temperature: torch.Tensor, own: torch.Tensor, slot: torch.Tensor | None
) -> torch.Tensor:
    """Arguments as `sharpness_triton` has them."""
    beta = torch.empty(len(temperature), dtype=torch.float32)
    factor = beta.new_zeros(len(temperature)) if slot is None else own[slot]
    _sharpness(log.numpy(), temperature.numpy(), factor.numpy(), beta.numpy())
    return beta


@njit
def _learn(
    log, trees,  # [2] fp32
    bit,
    slot, num_run, accepted,  # [R] int64
    path,  # [R, D+1] int64
    score,  # [S, N] fp32
    origin,  # [S, N] uint8
    heat,  # [S] fp32
    lowest, highest, prior, memory,
    own, own_trees,  # [S] fp32, or [0]
    own_most, own_prior, own_memory,
):  # fmt: skip
    num_nodes = score.shape[1]
    greedy, sampling = math.exp(log[0]), math.exp(log[1])
    pull, count = np.zeros(2), np.zeros(2)
    for request in range(len(slot)):
        at, run = slot[request], min(num_run[request], num_nodes)
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
        which = 0 if greedy * heat[at] <= sampling else 1
        pull[which] += error
        count[which] += 1
    for which in range(2):
        trees[which] = min(trees[which] + _F(count[which]), memory)
        moved = log[which] + pull[which] / (prior + trees[which])
        log[which] = min(max(moved, lowest), highest)


@njit
def _sharpness(
    log,  # [2] fp32
    temperature,  # [R] fp32
    own,  # [R] fp32
    beta,  # [R] fp32
):
    greedy, sampling = math.exp(log[0]), math.exp(log[1])
    for request in range(len(temperature)):
        sharp = greedy
        if temperature[request] > 0:
            sharp = min(greedy, sampling / temperature[request])
        beta[request] = sharp * math.exp(own[request])
