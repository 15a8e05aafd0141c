"""DraftTree: a batch of draft trees in device tensors of fixed shape.

Nodes are in descending order of score, parents before children. A child never scores above its
parent, so the first n nodes are a tree for every n: a smaller budget is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from vllm_specblock.triton_kernels.tree.node_bits import climb, unpack_bits

MAX_NODES = 256
"""Largest N that the attention kernels are tested for."""


@dataclass(frozen=True)
class DraftTree:
    """R trees of N node slots. Node 0 is the root and is not stored; entry i is node i+1.

    Raises ValueError for more than 256 node slots.
    """

    TENSORS: ClassVar = ("token", "parent", "depth", "logprob", "size", "ancestors")

    token: torch.Tensor  # [R, N] int64, target vocabulary; slots not in use hold a valid id
    parent: torch.Tensor  # [R, N] int32, node index, 0 for the root; −1: slot not in use
    depth: torch.Tensor  # [R, N] int32, 1 for a child of the root
    logprob: torch.Tensor  # [R, N] fp32, cumulative log-score in nats; −inf: slot not in use
    size: torch.Tensor  # [R] int32, nodes in use; they come first
    ancestors: torch.Tensor  # [R, N+1, W] int64, see `climb`
    # [R, N] uint8, bit 0: drafter 1 drafted the node, bit 1: drafter 2; 0: slot not in use. None:
    # drafter 1 drafted all of them.
    origin: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (count := self.token.shape[1]) > MAX_NODES:
            raise ValueError(
                f"A draft tree holds at most {MAX_NODES} nodes, and {count} were given."
            )

    @classmethod
    def from_nodes(
        cls,
        token: torch.Tensor,
        parent: torch.Tensor,
        logprob: torch.Tensor,
        size: torch.Tensor,
        max_depth: int | None = None,
    ) -> DraftTree:
        """Return a tree of sorted nodes; arguments as the attributes, and as in `climb`."""
        ancestors, depth = climb(parent, max_depth)
        return cls(token, parent, depth, logprob, size, ancestors)

    @classmethod
    def chain(cls, token: torch.Tensor, logprob: torch.Tensor, size: torch.Tensor) -> DraftTree:
        """Return one chain per request: node i is the parent of node i+1, for `size` nodes."""
        slot = torch.arange(token.shape[1], device=token.device)
        used = slot < size[:, None]
        return cls.from_nodes(
            torch.where(used, token, 0),
            torch.where(used, slot, -1).int(),
            torch.where(used, logprob, float("-inf")),
            size,
        )

    @classmethod
    def empty(cls, num_requests: int, num_nodes: int, device: torch.device | str) -> DraftTree:
        """No node in use."""
        token = torch.zeros(num_requests, num_nodes, dtype=torch.int64, device=device)
        return cls.chain(token, token.float(), token.new_zeros(num_requests, dtype=torch.int32))

    def origins(self) -> torch.Tensor:
        """Return `origin`, also if it is None."""
        return (self.parent >= 0).view(torch.uint8) if self.origin is None else self.origin

    def where(self, condition: torch.Tensor, other: DraftTree) -> DraftTree:
        """Return `other`'s tree where `condition` [R] bool holds, else this one."""

        def pick(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return torch.where(condition.view(-1, *[1] * (mine.dim() - 1)), theirs, mine)

        tree = DraftTree(*(pick(getattr(self, x), getattr(other, x)) for x in self.TENSORS))
        if self.origin is None and other.origin is None:
            return tree
        return replace(tree, origin=pick(self.origins(), other.origins()))

    def ancestor_mask(self) -> torch.Tensor:
        """Return [R, N+1, N+1] bool: column j is on the path to node i."""
        return unpack_bits(self.ancestors, self.token.shape[1] + 1)

    def chains_where(self, condition: torch.Tensor) -> DraftTree:
        """Reduce the trees to their best path where `condition` [R] is not 0.

        It is the path with the most expected accepted tokens, the sum of exp(logprob).
        """
        on_path = self.ancestor_mask()[:, 1:, 1:]  # [R, N, N]
        used = self.parent >= 0
        gain = (on_path * self.logprob.exp()[:, None]).sum(-1)
        end = torch.where(used, gain, float("-inf")).argmax(-1)  # [R]
        count = on_path.shape[1]
        path = on_path.gather(1, end[:, None, None].expand(-1, 1, count))[:, 0] & used
        # Nodes of a path ascend with their depth: to the front in order, the rest behind.
        entry = torch.where(path, self.depth, count + 1).argsort(dim=1, stable=True)
        token, logprob = self.token.gather(1, entry), self.logprob.gather(1, entry)
        chain = DraftTree.chain(token, logprob, path.sum(1).int())
        if self.origin is not None:
            origin = torch.where(chain.parent >= 0, self.origin.gather(1, entry), 0)
            chain = replace(chain, origin=origin)
        return self.where(condition != 0, chain)
