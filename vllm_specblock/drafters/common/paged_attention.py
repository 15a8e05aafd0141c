"""Attention of one drafter forward over paged caches: store every row, then attend."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from vllm_specblock.commit.store import store_kv
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)

if TYPE_CHECKING:  # it needs Numba
    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing


class PagedAttention:
    """The `attend` callable of one drafter forward: stores every row, then attends.

    Args:
        caches: one [blocks, kv heads, block size · K, 2D] per drafter layer.
        kv_index: [T, K] int64, where each row's positions are stored; negative for padding.
        queries: what the rows see; with `kept`, what the rows that the last layer keeps see.
    """

    def __init__(
        self,
        caches: list[torch.Tensor],
        kv_index: torch.Tensor,
        queries: TreeAttentionBatch,
        kept: TreeAttentionBatch | None = None,
    ) -> None:
        self.caches, self.kv_index = caches, kv_index.flatten()
        self.queries = [queries] * len(caches)
        if kept is not None:
            self.queries[-1] = kept

    @cached_property
    def packing(self) -> Packing | None:
        """Layout of the caches on a CPU."""
        return packing_on_cpu(self.caches[0])

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [Q..., heads, D], key and value [T..., kv heads, D] → [Q..., heads, D]."""
        cache = self.caches[layer]
        key, value = key.flatten(0, -3), value.flatten(0, -3)
        store_kv(cache, self.kv_index, key, value, packing=self.packing)
        out = self.queries[layer].attend(
            query.flatten(0, -3), cache, query.shape[-1] ** -0.5, packing=self.packing
        )
        return out.view_as(query)
