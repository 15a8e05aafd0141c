"""Rank-guided tree growth in one launch per block; `growth.py` is its reference."""

from __future__ import annotations

import torch

from vllm_specblock.candidates import tree_of
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.tree_shape import Starts, TreeShape
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import Growing, Limits
from vllm_specblock.triton_kernels.drafting.expand_numba import CompiledGrowing
from vllm_specblock.triton_kernels.optional_numba import takes
from vllm_specblock.triton_kernels.tree.select_tree import MOST_CANDIDATES


def expansion(
    shape: TreeShape, width: torch.Tensor, num_requests: int
) -> Expansion | FusedExpansion:
    """Make an expansion on the device of `width`: fused, on a GPU if C is not too large.

    Args:
        width: [4] int64, `shape.branching` on the device.
    """
    fused = takes(width) or (width.is_cuda and shape.candidates <= MOST_CANDIDATES)
    return (FusedExpansion if fused else Expansion)(shape, width, num_requests)


class FusedExpansion:
    """`Expansion` in one launch per block: the same calls with the same results, in this order."""

    def __init__(self, shape: TreeShape, width: torch.Tensor, num_requests: int) -> None:
        sizes = shape.block_size, shape.num_blocks, shape.num_starts, shape.width, shape.budget
        kind = Growing if width.is_cuda else CompiledGrowing
        self.growing = kind(Limits(*sizes), width, num_requests)

    def first_block(
        self, top_logprob: torch.Tensor, top_token: torch.Tensor, bucket: torch.Tensor
    ) -> None:
        one_row = (top_logprob[:, None], top_token[:, None], bucket[:, None])
        self.grown = self.growing.attach_block(1, None, None, *one_row)

    def starts(self, block: int) -> Starts:
        return Starts(*self.grown)

    def next_block(
        self,
        starts: Starts,
        block: int,
        top_logprob: torch.Tensor,
        top_token: torch.Tensor,
        bucket: torch.Tensor,
    ) -> None:
        self.grown = self.growing.attach_block(
            block, starts.node, starts.valid, top_logprob, top_token, bucket
        )

    def finish(self) -> DraftTree:
        return tree_of(self.grown)
