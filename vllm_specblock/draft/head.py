"""The interface of a head: it yields a draft tree and advances on what the target committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class CommittedRows:
    """What one target step committed, as the rows that a head advances on.

    Row t holds the target's features of the token at `position[t]` and the token after it.
    The rows of a request are consecutive. Requests that drafted have a fixed number of rows
    whatever was accepted; those beyond the accepted path are padding (`slot` −1).

    Attributes (T rows, R requests):
        features: [T, 3·Ht], low, mid and top hidden states of the target.
        token: [T] int64, the token at position + 1, target vocabulary.
        position: [T] int64.
        slot: [T] int64, the target's cache slot of that position, −1 for padding.
        row_start: [R+1] int32, first row of each request.
        row_start_host: the same on the host (no copy from the device: it follows from what
            was scheduled).
        last: [R] int64, the newest row of each request, from which it drafts.
        block_table: [R, max blocks] int32.
        block_size: tokens in one block.
        max_position: host upper bound of `position`, for loop bounds only.
    """

    features: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    row_start: torch.Tensor
    row_start_host: list[int]
    last: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    max_position: int


class Head(ABC):
    """Anything that yields a DraftTree for every request.

    A head keeps no state of a request outside the paged cache: a request can be preempted,
    resumed or served from cached prefixes without the head being told.
    """

    num_nodes: int
    """N, nodes of every tree it yields."""

    max_depth: int
    """The deepest path it can draft."""

    @abstractmethod
    def propose(self, rows: CommittedRows) -> DraftTree:
        """Advance on the committed rows, and draft from the last row of every request.

        Returns:
            R trees of `num_nodes` slots, rooted in `token[last]`.
        """
