"""Combined: the trees that are verified, and which drafter each of their nodes is from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class Combined:
    """R trees of N node slots, and their authors.

    Attributes:
        tree: the trees.
        author: as `origin`, or the drafter of all nodes, 1 or 2.
    """

    tree: DraftTree
    author: torch.Tensor | int

    @cached_property
    def origin(self) -> torch.Tensor:
        """[R, N] uint8, bit 0: drafter 1 drafted the node, bit 1: drafter 2; 0: slot not in use."""
        if isinstance(self.author, torch.Tensor):
            return self.author
        used = (self.tree.parent >= 0).view(torch.uint8)
        return used if self.author == 1 else used * self.author

    def empty_where(self, condition: torch.Tensor) -> Combined:
        """No node in use for the requests where `condition` [R] bool holds."""
        requests, nodes = self.tree.token.shape
        none = DraftTree.empty(requests, nodes, self.tree.token.device)
        return Combined(
            self.tree.where(condition, none), torch.where(condition[:, None], 0, self.origin)
        )

    def where(self, chain: torch.Tensor) -> Combined:
        """The best path alone, as a chain, for the requests where `chain` [R] is true, or not 0."""
        chain = chain != 0
        entry, length = self.tree.best_path()
        place = torch.arange(entry.shape[1], device=entry.device)
        origin = torch.where(place < length[:, None], self.origin.gather(1, entry), 0)
        return Combined(
            self.tree.where(chain, self.tree.chain_of(entry, length)),
            torch.where(chain[:, None], origin, self.origin),
        )
