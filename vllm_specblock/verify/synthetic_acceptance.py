"""Synthetic acceptance by the drafts' own scores: for benchmarks only.

A node's child is taken with exactly the probability that the tree gives it, the exponential of
the difference of their cumulative scores, and none with what is left. So the accepted length has
the expectation that the tree's scores promise, and nothing else of a step changes: the target runs,
its sampler draws, and what it drew is the bonus token.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_specblock.triton_kernels.verify.accept_path import DrawnRows
from vllm_specblock.verify.accept_path import AcceptedPaths, accept_path, walk_rows

_DRAWS = 1 << 17
_SEED_FACTOR = 0x9E3779B1
"""Odd: seeds one apart read far from each other."""


class SyntheticAcceptance:
    """Which children would be taken, by request slot (S) and node (N).

    Draws come from a fixed table and are keyed by (seed, position), as the sampler's noise is: a
    request draws the same again however it is batched, and no position draws twice.

    Attributes:
        low, high: [S, N] fp32, a node is taken when its parent draws a number in [low, high).
    """

    def __init__(self, num_slots: int, num_nodes: int, device: torch.device) -> None:
        self.low = torch.zeros(num_slots, num_nodes, device=device)
        self.high = torch.zeros(num_slots, num_nodes, device=device)
        generator = torch.Generator().manual_seed(0)
        self.draws = torch.rand(_DRAWS, generator=generator).to(device)
        self.earlier = torch.ones(num_nodes, num_nodes, device=device).tril(-1)

    def forget(self, req_idx: int | slice) -> None:
        """Take no node of `req_idx` until there is a tree."""
        self.low[req_idx] = self.high[req_idx] = 0

    def note(self, slots: torch.Tensor, parent: torch.Tensor, logprob: torch.Tensor) -> None:
        """Lay siblings side by side in 0 … 1; `slots` [R] int64, `DraftTree` fields [R, N]."""
        used, parent = parent >= 0, parent.clamp(min=0).long()
        above = torch.nn.functional.pad(logprob, (1, 0)).gather(1, parent)
        # −inf − −inf is NaN: a node that is not in use has no share.
        share = torch.where(used, (logprob - above).exp(), 0)  # [R, N]
        siblings = (parent[:, :, None] == parent[:, None]) * self.earlier
        low = (siblings * share[:, None]).sum(-1)
        self.low[slots], self.high[slots] = low, low + share

    def accept_path(
        self,
        slots: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
        token: torch.Tensor,
        parent: torch.Tensor,
        depth: torch.Tensor,
        ancestors: torch.Tensor,
        live: torch.Tensor,
        sampled: torch.Tensor,
        max_depth: int,
    ) -> AcceptedPaths:
        """`verify.accept_path.accept_path`, with drawn numbers in the place of the target's tokens.

        Args:
            slots: [R] int64.
            seed: [R] int64, of each request.
            position: [R, N+1] int64, where the token after a node would stand.
            others: as `verify.accept_path.accept_path`.
        """
        key = (position + seed[:, None] * _SEED_FACTOR) & (_DRAWS - 1)
        draw = self.draws[key].gather(1, parent.clamp(min=0).long())
        taken = (self.low[slots] <= draw) & (draw < self.high[slots])
        accepted_paths = accept_path(
            taken.long(), parent, depth, ancestors, live, torch.ones_like(sampled), max_depth
        )
        # Tokens of the path's nodes, and after the last of them what the target drew.
        path, accepted = accepted_paths.path, accepted_paths.accepted[:, None]
        drafted = torch.nn.functional.pad(token, (1, 0)).gather(1, path).roll(-1, 1)
        place = torch.arange(path.shape[1], device=path.device)
        output = torch.where(place < accepted, drafted, sampled.gather(1, path))
        return AcceptedPaths(
            path, accepted_paths.accepted, torch.where(place <= accepted, output, 0)
        )

    def accept_path_rows(
        self,
        rows: DrawnRows,
        seed: torch.Tensor,
        position: torch.Tensor,
        parent: torch.Tensor,
        depth: torch.Tensor,
        ancestors: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`verify.accept_path.accept_path_rows`, with drawn numbers in the place of the target's
        tokens.

        Args:
            seed: [≥ S] int64, of the request in each slot.
            position: [rows] int64, where the token after a row would stand.
            others: as `verify.accept_path.accept_path_rows`.
        """

        def walk(at: torch.Tensor, *trees: Any) -> AcceptedPaths:
            return self.accept_path(rows.req_idx, seed[rows.req_idx], position[at], *trees)

        return walk_rows(rows, parent, depth, ancestors, path, accepted, walk)
