"""Verification result of a step's trees, for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerificationResult(NamedTuple):
    """Verification results of R requests in S request slots.

    Tensors by request may be columns of a table; tensors by slot are contiguous.

    Attributes:
        req_idx: [R] integers.
        num_run: [R] integers, verified nodes, the first ones of the tree; 0: skip the request.
        accepted: [R] int32, draft nodes on the accepted path.
        path: [R, D+1] int64, node at each position of that path; 0, the root, first and beyond
            the end.
        score: [S, N] fp32, cumulative draft log-scores of the nodes.
        origin: [S, N] uint8, the drafters that drafted each node, bit 0 the first, bit 1 the
            second; 0: no draft of ours, such as a placeholder of the scheduler.
        temperatures: [S] fp32, temperature at which the requests sample; 0: greedy.
    """

    req_idx: torch.Tensor
    num_run: torch.Tensor
    accepted: torch.Tensor
    path: torch.Tensor
    score: torch.Tensor
    origin: torch.Tensor
    temperatures: torch.Tensor
