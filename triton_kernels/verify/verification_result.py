"""Verification result of a step's trees, for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerificationResult(NamedTuple):
    """Verification results of R requests in S request slots.

    Tensors by request may be columns of a table; tensors by slot are contiguous.
    """

    req_idx: torch.Tensor  # [R] integers
    num_run: torch.Tensor  # [R] integers, verified nodes, a tree's first ones; 0: skip the request
    accepted: torch.Tensor  # [R] int32, draft nodes on the accepted path
    # [R, D+1] int64, node at each position of that path; 0, the root, first and beyond the end.
    path: torch.Tensor
    score: torch.Tensor  # [S, N] fp32, cumulative draft log-scores of the nodes
    # [S, N] uint8, the drafters of each node, bit 0 the first, bit 1 the second; 0: no draft of
    # ours, such as a placeholder of the scheduler.
    origin: torch.Tensor
    temperatures: torch.Tensor  # [S] fp32; 0: greedy
