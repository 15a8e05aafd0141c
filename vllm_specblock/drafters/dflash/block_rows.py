"""Attention metadata for blocks of masks.

Mask rows follow each request's newest row and attend to each other; committed tokens only store
keys and values. A block borrows the slots of the tokens to come, which are reserved for the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.commit.store import store_kv
from vllm_specblock.drafters.common.chunked_advance import MAX_ROWS
from vllm_specblock.drafters.common.paged_attention import PagedAttention
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.tree import pack_bits
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)
from vllm_specblock.triton_kernels.warm_up import compile_attention


class BlockRows:
    """Stores what committed tokens leave, and builds the PagedAttention of a step's blocks.

    Args:
        caches: one [blocks, kv heads, block size, 2D] per drafter layer.
        sees: [S, S] bool, which rows of its block (the root, then its masks) each row sees.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(self, caches: list[Tensor], sees: Tensor, max_position: int) -> None:
        self.caches, self.size, self.max_position = caches, len(sees), max_position
        self.packing = packing_on_cpu(caches[0])
        self.offset = torch.arange(self.size, device=caches[0].device)
        self.mask_words = pack_bits(sees)  # [S, W]

    def store(self, layer: int, rows: CommittedTokens, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values [T, kv heads, D] of some rows."""
        store_kv(self.caches[layer], rows.kv_slot, key, value, packing=self.packing)

    def blocks(
        self, rows: CommittedTokens, requests: Tensor | None
    ) -> tuple[PagedAttention, Tensor]:
        """The blocks behind the newest rows of a step.

        Args:
            rows: of the step.
            requests: [n] int64, for which ones; None: for all.

        Returns:
            the attention over n·S rows, block by block, and their positions [n, S] int64.
        """
        table, size, last = rows.block_table, self.size, rows.last
        if requests is not None:
            last, table = last[requests], table[requests]
        count = len(last)
        first, ahead = rows.index[last] + 1, rows.position[last, None] + 1
        index, position = first[:, None] + self.offset, ahead + self.offset
        block = (index // rows.block_size).clamp(max=table.shape[1] - 1)
        kv_slot = table.gather(1, block).long() * rows.block_size + index % rows.block_size
        kv_slot = torch.where(position < self.max_position, kv_slot, -1)
        first = first.int()
        queries = TreeAttentionBatch(
            table,
            torch.arange(0, count * size + 1, size, dtype=torch.int32, device=last.device),
            [size * request for request in range(count + 1)],
            (first + size).clamp(max=self.max_position),
            min(rows.max_position + 1 + size, self.max_position),
            first.repeat_interleave(size),  # dense, which a view of one request is not
            self.mask_words.repeat(count, 1),
            first,
        )
        return PagedAttention(self.caches, kv_slot.view(-1, 1), queries), position

    def warm_up(self, block_table: Tensor, most_rows: int, num_heads: int) -> None:
        """Compile the attention; arguments as `Drafter.warm_up` has them."""
        cache = self.caches[0]
        query = cache.new_empty(1, num_heads, cache.shape[-1] // 2)
        words = self.mask_words.shape[-1]
        most = min(most_rows, MAX_ROWS) * self.size
        compile_attention(query, cache, block_table, words, most, self.max_position)
