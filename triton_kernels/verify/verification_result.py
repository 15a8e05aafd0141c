"""Verification result of a step's trees, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class VerificationResult:
    """The verdicts on R requests, each in one of S request slots.

    What is of the requests may be columns of a table; what is of the slots is contiguous.

    Attributes:
        req_idx: [R] integers.
        num_run: [R] integers, nodes that the target ran on, the first ones of the tree; 0 leaves
            the request out, whatever its other rows say.
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

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """All of it, strides and lengths included, in the order of the kernels that learn."""
        return (
            self.req_idx,
            self.req_idx.stride(0),
            self.num_run,
            self.num_run.stride(0),
            self.accepted,
            self.accepted.stride(0),
            self.path,
            self.path.stride(0),
            self.path.shape[1],
            self.score,
            self.origin,
            self.temperatures,
            len(self.req_idx),
            self.score.shape[1],
        )

    def on_host(self) -> tuple[np.ndarray, ...]:
        """As loops on a CPU take it: the fields in their order, requests' integers as int64."""
        rows = (each.long() for each in (self.req_idx, self.num_run, self.accepted))
        rest = (self.path, self.score, self.origin, self.temperatures)
        return tuple(each.numpy() for each in (*rows, *rest))
