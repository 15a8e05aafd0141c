"""Tensors of recorded requests, and a step's additions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..verify.verification_result import VerificationResult


class SlabTensors(NamedTuple):
    """G slabs of W rows each, and sums of S request slots; contiguous, on one device.

    Row i of a slab belongs to the token x_p, p = begin + i. A row's place depends only on its
    position, so a repeated step writes the same rows.
    """

    states: torch.Tensor  # [G, W, 3·Ht], the target's states at x_p, columns low, mid, high
    last: torch.Tensor  # [G, W, Ht], of the same dtype, what the target's LM head reads at x_p
    token: torch.Tensor  # [G, W] int32, x_{p+1}
    begin: torch.Tensor  # [G] int32, first position
    end: torch.Tensor  # [G] int32, position after the newest row; `begin` if there is none
    of_slot: torch.Tensor  # [S] int32, the slab of the request in each slot; −1: not recorded
    # [S] fp32, s [SpecBlock, eq. 8], as far as a step can know it: 1 for every walk that ends at a
    # node with children, whose probabilities all went to wrong tokens.
    missed: torch.Tensor
    steps: torch.Tensor  # [S] int32, target steps with a tree
    committed: torch.Tensor  # [S] int32, tokens committed in these

    @classmethod
    def empty(
        cls,
        slabs: int,
        rows: int,
        hidden: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> SlabTensors:
        """No request is recorded. `rows` is W, `hidden` Ht."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)

        return cls(
            zeros(slabs, rows, 3 * hidden, dtype=dtype),
            zeros(slabs, rows, hidden, dtype=dtype),
            zeros(slabs, rows),
            zeros(slabs),
            zeros(slabs),
            zeros(slots).fill_(-1),
            zeros(slots, dtype=torch.float32),
            zeros(slots),
            zeros(slots),
        )


class StepToRecord(NamedTuple):
    """What a step committed, and the verdicts on the trees it ran on.

    T rows, R requests, B rows of the target's batch, N nodes.
    """

    request: torch.Tensor  # [T] int64, request of each row
    source: torch.Tensor  # [T] int64, its row of `states` and `last`
    token: torch.Tensor  # [T] int64, x_{p+1}
    position: torch.Tensor  # [T] int64, p
    cache_slot: torch.Tensor  # [T] int64, −1 for padding
    newest: torch.Tensor  # [R] int64, the newest row of each request
    # [B, Ht] each, of the low, mid and high layer.
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    last: torch.Tensor  # [B, Ht], of the same dtype
    result: VerificationResult  # `score` and `temperatures` are not read
    parent: torch.Tensor  # [S, N] int32, parents of nodes 1 … N of the trees under verification
