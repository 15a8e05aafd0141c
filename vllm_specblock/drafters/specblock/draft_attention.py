"""Attention metadata of SpecBlock's blocks over a paged cache of K entries per token.

Entry i·K + k is position k of row i. A row of block 1 sees all entries of earlier rows and its own
up to k: causal attention. A row of a later block sees the entries before its start, the positions
on its path and its own up to k: a prefix length and a few bits (paper, §3.1 and §3.2).

Later blocks borrow the slots of the request's next tokens, which are reserved for the step.
"""

from __future__ import annotations

import torch

from vllm_specblock.drafters.common.chunked_advance import MAX_ROWS
from vllm_specblock.drafters.common.paged_attention import PagedAttention
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.specblock.tree_shape import Starts
from vllm_specblock.tree import pack_bits
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)
from vllm_specblock.triton_kernels.drafting.first_block_metadata import (
    FirstBlockMetadata,
    first_block_metadata_triton,
)
from vllm_specblock.triton_kernels.drafting.later_block_metadata import (
    LaterBlockMetadata,
    later_block_metadata_triton,
)
from vllm_specblock.triton_kernels.warm_up import compile_attention


class DraftAttentionBuilder:
    """Builds the PagedAttention of each block of a step.

    Args:
        caches: as PagedAttention.
        block_size: K.
        num_starts: S, rows of every block after the first.
        num_blocks: M.
        max_position: positions at or beyond it have no slot (the model's length limit).
        path_rope: RoPE counts the tokens on the path to a later block's row; otherwise all rows
            have the base of block 1's drafting row.
    """

    def __init__(
        self,
        caches: list[torch.Tensor],
        block_size: int,
        num_starts: int,
        num_blocks: int,
        max_position: int,
        device: torch.device,
        path_rope: bool = False,
    ) -> None:
        self.caches, self.K, self.S = caches, block_size, num_starts
        self.max_position, self.path_rope = max_position, path_rope
        self.k = torch.arange(block_size, device=device)
        self.rows = torch.arange(num_starts, device=device)
        # Row 0 is the drafting row of block 1: later blocks see it in their prefix, so it owns no
        # bits. Row 1 + i owns bits i·K … i·K + K − 1 of the window.
        rows = 1 + (num_blocks - 1) * num_starts
        sees = torch.zeros(rows, block_size, max(1, rows - 1), block_size, dtype=torch.bool)
        later = torch.arange(rows - 1)
        sees[1 + later, :, later] = torch.ones(block_size, block_size, dtype=torch.bool).tril()
        self.own = pack_bits(sees.flatten(2)).to(device)  # [rows, K, W]
        # No row of block 1 has bits.
        self.no_bits = self.own.new_zeros(MAX_ROWS * block_size, self.own.shape[-1])
        self.fused = self.own.is_cuda  # one launch for each block, in place of torch

    def step(self, rows: CommittedTokens) -> None:
        """Begin a step; later blocks stand behind the last of `rows`."""
        # Not the rows themselves: a prompt's states may be hundreds of megabytes.
        self.position, self.index = rows.position, rows.index
        self.row, self.table = rows.last, rows.block_table
        self.token_block, self.newest_bound = rows.block_size, rows.max_position

    @property
    def newest(self) -> torch.Tensor:
        """[R] int64, the position of the row that drafts."""
        return self.position[self.row]

    def first(self, rows: CommittedTokens) -> tuple[PagedAttention, torch.Tensor]:
        """Block 1: committed rows, of which the last of each request drafts.

        Args:
            rows: of the step, all or some; those before them are in the cache already.

        Returns:
            the attention, and [T] int64: RoPE's position of each row's first.
        """
        K, table, requests = self.K, rows.block_table, len(rows.row_start_host) - 1
        of = self._first(rows)
        words, ends = self.no_bits[: len(of.prefix_len)], of.ends
        limit = (rows.max_position + 1) * K

        def sees(start: torch.Tensor, host: list[int], prefix: torch.Tensor) -> TreeAttentionBatch:
            return TreeAttentionBatch(table, start, host, ends, limit, prefix, words, ends)

        queries = sees(of.query_start, [row * K for row in rows.row_start_host], of.prefix_len)
        kept = sees(of.kept_start, [K * r for r in range(requests + 1)], of.kept_prefix)
        return PagedAttention(self.caches, of.kv_index, queries, kept), of.base

    def _first(self, rows: CommittedTokens) -> FirstBlockMetadata:
        """Tensors of `first`, in one launch on a GPU."""
        K, requests = self.K, len(rows.last)
        position, index, kv_slot = rows.position, rows.index, rows.kv_slot
        if self.fused:
            given = position, index, kv_slot, rows.row_start, rows.last
            return first_block_metadata_triton(*given, K)
        see = (index[:, None] * K + self.k + 1).int()  # [T, K]
        return FirstBlockMetadata(
            kv_index=torch.where(kv_slot >= 0, kv_slot * K, -K)[:, None] + self.k,
            prefix_len=see.flatten(),
            base=position + 1,
            query_start=rows.row_start * K,
            ends=((index[rows.last] + 1) * K).int(),
            kept_start=torch.arange(0, requests * K + 1, K, dtype=torch.int32, device=see.device),
            kept_prefix=see[rows.last].flatten(),
        )

    def warm_up(self, block_table: torch.Tensor, most_rows: int, num_heads: int) -> None:
        """Compile the attention of every block; arguments as `Drafter.warm_up` has them."""
        cache = self.caches[0]
        query = cache.new_empty(1, num_heads, cache.shape[-1] // 2)
        compile_attention(
            query,
            cache,
            block_table,
            self.own.shape[-1],
            min(most_rows, MAX_ROWS) * self.K,
            self.max_position * self.K,
            packing=packing_on_cpu(cache),
        )

    def begin(self, requests: torch.Tensor | None) -> None:
        """Begin later blocks for some requests ([n] int64; None: all of the step)."""
        row, table = self.row, self.table
        if requests is not None:
            row, table = row[requests], table[requests]
        last = row if self.fused else self.index[row]  # the kernel looks the index up
        self.last, self.block_table, self.requests = last, table, len(last)
        # Of each drafted row: its prefix, its window bits, and the tokens drafted before it.
        if self.fused:  # each launch fills in its own rows
            rows, _, width = self.own.shape
            self.prefix = last.new_empty(len(last), rows)
            self.mask_words = last.new_empty(len(last), rows, width)
            self.reach: torch.Tensor | None
            self.reach = torch.empty_like(self.prefix) if self.path_rope else None
        else:
            self.rope = self.position[row]
            self.prefix = last[:, None] * self.K  # [R, 1]
            self.mask_words = self.own.new_zeros(len(last), 1, self.own.shape[-1])  # [R, 1, W]
            self.reach = torch.zeros_like(self.prefix)

    def next(self, block: int, starts: Starts) -> tuple[PagedAttention, LaterBlockMetadata]:
        """Return the attention of block `block` ≥ 2 from S starts per request, and its rows."""
        K, S, table = self.K, self.S, self.block_table
        if self.fused:
            metadata = later_block_metadata_triton(
                starts.row,
                starts.position,
                starts.valid,
                self.position,
                self.index,
                self.last,
                self.own,
                table,
                self.prefix,
                self.mask_words,
                self.reach,
                block,
                self.token_block,
                self.max_position,
            )
        else:
            metadata = self._later(block, starts)
        each = [S * K * r for r in range(self.requests + 1)]
        limit = min(self.newest_bound + 1 + (block - 1) * S, self.max_position) * K
        queries = TreeAttentionBatch(
            table,
            metadata.query_start,
            each,
            metadata.seq_len,
            limit,
            metadata.prefix_len,
            metadata.mask_words,
            metadata.tree_start,
        )
        return PagedAttention(self.caches, metadata.kv_index, queries), metadata

    def _later(self, block: int, starts: Starts) -> LaterBlockMetadata:
        """What `later_block_metadata_triton` works out."""
        K, S, size = self.K, self.S, self.token_block
        first_row = 1 + (block - 2) * S
        row, position = starts.row, starts.position  # [R, S]
        of_drafting_row = row == 0
        prefix = torch.where(
            of_drafting_row, self.last[:, None] * K + position + 1, self.prefix.gather(1, row)
        )
        width = self.own.shape[-1]
        path = self.mask_words.gather(1, row[..., None].expand(-1, -1, width))
        path = path | self.own[row, position]  # [R, S, W]; row 0 owns no bits
        assert self.reach is not None  # a kernel alone does without
        reach = self.reach.gather(1, row) + position + 1
        self.prefix = torch.cat([self.prefix, prefix], 1)
        self.reach = torch.cat([self.reach, reach], 1)
        self.mask_words = torch.cat([self.mask_words, path], 1)

        limit = self.max_position - (self.rope - self.last)  # [R]
        at = self.last[:, None] + first_row + self.rows  # [R, S] places to borrow
        there = at < limit[:, None]
        block_index = (at // size).clamp(max=self.block_table.shape[1] - 1)
        kv_slot = self.block_table.gather(1, block_index).long() * size
        kv_slot = torch.where(there, kv_slot + at % size, -1)
        kv_index = torch.where(kv_slot >= 0, kv_slot * K, -K)[..., None] + self.k  # [R, S, K]

        own = self.own[first_row : first_row + S]  # [S, K, W]
        window = ((self.last + 1) * K).int()
        ahead = (block - 1) * S * K
        last = self.requests * S * K
        request = torch.arange(self.requests, device=at.device)[:, None]
        base = self.rope[:, None] + 1 + (reach if self.path_rope else torch.zeros_like(reach))
        return LaterBlockMetadata(
            kv_index=kv_index.flatten(0, 1),
            query_start=torch.arange(0, last + 1, S * K, dtype=torch.int32, device=at.device),
            prefix_len=prefix[..., None].expand(-1, -1, K).flatten().int(),
            mask_words=(path[:, :, None] | own).flatten(0, 2),
            seq_len=(window + ahead).minimum(limit * K).int(),
            tree_start=window,
            valid=starts.valid & there,
            source=((request * first_row + row) * K + position).flatten(),
            base=base.flatten(),
        )
