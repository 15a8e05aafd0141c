"""Shapes of a tree's growth, and the nodes that later blocks grow from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specblock.triton_kernels.tree.candidate_keys import MAX_DEPTH


@dataclass(frozen=True)
class TreeShape:
    """Sizes of an expansion.

    Attributes:
        block_size: K, positions per block.
        num_blocks: M.
        num_starts: S, rows of every block after the first.
        branching: children per rank bucket; at a position of 0 only the chain's own node is
            attached, and no block starts.
        budget: N, nodes of the tree.

    Raises:
        ValueError: paths of more than 255 tokens.
    """

    block_size: int
    num_blocks: int
    num_starts: int
    branching: tuple[int, int, int, int]
    budget: int

    def __post_init__(self) -> None:
        if self.max_depth > MAX_DEPTH:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} positions draft paths of "
                f"{self.max_depth} tokens, but at most {MAX_DEPTH} are supported."
            )

    @property
    def width(self) -> int:
        """B, candidates that are looked at per position."""
        return max(1, *self.branching)

    @property
    def max_depth(self) -> int:
        """M · K, tokens on the longest path."""
        return self.num_blocks * self.block_size

    @property
    def num_rows(self) -> int:
        """Drafted rows: the drafting row, and S per further block."""
        return 1 + (self.num_blocks - 1) * self.num_starts

    @property
    def candidates(self) -> int:
        """C, the root included."""
        return 1 + self.num_rows * self.block_size * self.width


@dataclass(frozen=True)
class Starts:
    """Nodes from which the next block grows, S per request: [R, S] each."""

    node: torch.Tensor  # int64, candidate index
    token: torch.Tensor  # int64
    # int64, the drafted row that the node came from: 0 is the drafting row, the s-th start of
    # block m is row 1 + (m − 2)·S + s.
    row: torch.Tensor
    position: torch.Tensor  # int64, 0-based position in that row
    valid: torch.Tensor  # bool; False: padding
