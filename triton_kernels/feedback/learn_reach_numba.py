"""What verdicts teach of how often nodes of a score are reached, for CPUs; see `learn_reach.py`."""

from __future__ import annotations

import numpy as np
import torch

from ..optional_numba import njit
from ..verify.verdicts import Verdicts

_F = np.float32


def learn_reach_numba(
    judged: torch.Tensor,
    reached: torch.Tensor,
    verdicts: Verdicts,
    bins_per_nat: int,
    decay: float,
) -> None:
    """Arguments as `learn_reach_triton` has them."""
    _learn(
        judged.numpy(), reached.numpy(), verdicts.slot.long().numpy(),
        verdicts.num_run.long().numpy(), verdicts.accepted.long().numpy(), verdicts.path.numpy(),
        verdicts.score.numpy(), verdicts.origin.numpy(), verdicts.heat.numpy(), bins_per_nat, decay,
    )  # fmt: skip


@njit
def _learn(
    judged, reached,  # [2, bins] fp32
    slot, num_run, accepted,  # [R] int64
    path,  # [R, D+1] int64
    score,  # [S, N] fp32
    origin,  # [S, N] uint8
    heat,  # [S] fp32
    bins_per_nat, decay,
):  # fmt: skip
    num_bins, num_nodes = judged.shape[1], score.shape[1]
    seen, kept = np.zeros(judged.shape, _F), np.zeros(judged.shape, _F)
    any_seen = False
    for request in range(len(slot)):
        at, run = slot[request], min(num_run[request], num_nodes)
        kind = 1 if heat[at] > 0 else 0
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
