"""Who sees whom inside the drafter, over a paged cache of K entries for every token.

Flattened, entry i·K + k is position k of row i. A row of block 1 sees all entries of earlier
rows and its own up to k, which in this order is plain causal attention. A row of a later block
sees the entries before its start, the positions on its path and its own up to k: a prefix
length and a few bits (paper, §3.1 and §3.2).

Later blocks put their keys and values where the next tokens of the request will go. Those
slots are reserved for the step, are read by nobody else, and are overwritten when the tokens
come.
"""

from __future__ import annotations

import torch

from vllm_specblock.commit.store import store_kv
from vllm_specblock.draft.expand import Starts
from vllm_specblock.draft.head import CommittedRows
from vllm_specblock.draft.parts import MOST
from vllm_specblock.triton_kernels.block_sight import LaterSight, later_sight_triton
from vllm_specblock.triton_kernels.first_sight import FirstSight, first_sight_triton
from vllm_specblock.triton_kernels.packed import PackedQueries
from vllm_specblock.triton_kernels.warm_up import compile_attention


class PagedAttention:
    """The `attend` callable of one drafter forward: stores every row, then attends.

    Args:
        caches: one [blocks, kv heads, block size · K, 2D] per drafter layer.
        entry: [T, K] int64, where each row's positions are stored; negative for padding.
        queries: what the rows see; with `kept`, what the rows that the last layer keeps see.
    """

    def __init__(self, caches, entry, queries: PackedQueries, kept: PackedQueries | None = None):
        self.caches, self.entry = caches, entry.flatten()
        self.queries = [queries] * len(caches)
        if kept is not None:
            self.queries[-1] = kept

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [Q, K, heads, D], key and value [T, K, kv heads, D] → [Q, K, heads, D]."""
        cache = self.caches[layer]
        store_kv(cache, self.entry, key.flatten(0, 1), value.flatten(0, 1))
        out = self.queries[layer].attend(query.flatten(0, 1), cache, query.shape[-1] ** -0.5)
        return out.view_as(query)


class BlockSight:
    """Builds the PagedAttention of each block of a step.

    Args:
        caches: as PagedAttention.
        block_size: K.
        num_starts: S, rows of every block after the first.
        num_blocks: M.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(
        self,
        caches,
        block_size: int,
        num_starts: int,
        num_blocks: int,
        max_position: int,
        device: torch.device,
    ):
        self.caches, self.K, self.S = caches, block_size, num_starts
        self.max_position = max_position
        self.k = torch.arange(block_size, device=device)
        self.rows = torch.arange(num_starts, device=device)
        # Row 0 is the drafting row of block 1 and owns no bits: what later blocks see of it is
        # part of their prefix. Row 1 + i owns bits i·K … i·K + K − 1 of the window.
        num_rows = 1 + (num_blocks - 1) * num_starts
        self.own = torch.zeros(
            num_rows,
            block_size,
            window_words(num_blocks, num_starts, block_size),
            dtype=torch.int64,
        )
        for row in range(1, num_rows):
            for k in range(block_size):
                for bit in range((row - 1) * block_size, (row - 1) * block_size + k + 1):
                    word = int(self.own[row, k, bit // 64]) | 1 << bit % 64
                    self.own[row, k, bit // 64] = word - (1 << 64 if word >> 63 else 0)
        self.own = self.own.to(device)
        self.fused = self.own.is_cuda  # one launch for each block, in place of torch

    def step(self, rows: CommittedRows) -> None:
        """Begin a step; later blocks stand behind the last of `rows`."""
        self.rows_of_step, self.newest = rows, rows.position[rows.last]

    def first(self, rows: CommittedRows) -> PagedAttention:
        """Block 1: committed rows, of which the last of each request drafts.

        Args:
            rows: of the step, all or some; those before them are in the cache already.
        """
        K, table, size = self.K, rows.block_table, rows.block_size * self.K
        if self.fused:
            sight = first_sight_triton(
                rows.position, rows.slot, rows.row_start, rows.last, K, self.own.shape[-1]
            )
        else:
            sight = self._first(rows)
        num_requests = len(rows.row_start_host) - 1
        start = [row * K for row in rows.row_start_host]
        each = [K * r for r in range(num_requests + 1)]
        limit = [(rows.max_position + 1) * K] * num_requests
        queries = PackedQueries(
            table, size, sight.query_start, start, sight.ends, limit, sight.prefix_len,
            sight.words, sight.ends,
        )  # fmt: skip
        kept = PackedQueries(
            table, size, sight.kept_start, each, sight.ends, limit, sight.kept_prefix,
            sight.words, sight.ends,
        )  # fmt: skip
        return PagedAttention(self.caches, sight.entry, queries, kept)

    def _first(self, rows: CommittedRows) -> FirstSight:
        """What `first_sight_triton` works out."""
        K, requests = self.K, len(rows.last)
        see = (rows.position[:, None] * K + self.k + 1).int()  # [T, K]
        return FirstSight(
            entry=torch.where(rows.slot >= 0, rows.slot * K, -K)[:, None] + self.k,
            query_start=rows.row_start * K,
            prefix_len=see.flatten(),
            words=self.own.new_zeros(see.numel(), self.own.shape[-1]),
            ends=((rows.position[rows.last] + 1) * K).int(),
            kept_start=torch.arange(0, requests * K + 1, K, dtype=torch.int32, device=see.device),
            kept_prefix=see[rows.last].flatten(),
        )

    def warm_up(self, block_table: torch.Tensor, most_rows: int, num_heads: int) -> None:
        """Compile the attention of every block; arguments as `Head.warm_up` has them."""
        cache = self.caches[0]
        query = cache.new_empty(1, num_heads, cache.shape[-1] // 2)
        compile_attention(
            query, cache, block_table, self.own.shape[-1], min(most_rows, MOST) * self.K,
            self.max_position * self.K,
        )  # fmt: skip

    def begin(self, requests: torch.Tensor | None) -> None:
        """Say for which requests ([n] int64; None: all of the step) later blocks are drafted."""
        step, last, table = self.rows_of_step, self.newest, self.rows_of_step.block_table
        if requests is not None:
            last, table = last[requests], table[requests]
        self.last, self.block_table, self.requests = last, table, len(last)
        self.token_block, self.newest_bound = step.block_size, step.max_position
        # Per row that has been drafted: entries it sees as prefix, and its window bits.
        if self.fused:  # as many as there will be; every launch fills in its own
            rows, _, width = self.own.shape
            self.prefix = last.new_empty(len(last), rows)
            self.words = last.new_empty(len(last), rows, width)
        else:
            self.prefix = last[:, None] * self.K  # [R, 1]
            self.words = self.own.new_zeros(len(last), 1, self.own.shape[-1])  # [R, 1, W]

    def next(self, block: int, starts: Starts) -> tuple[PagedAttention, torch.Tensor]:
        """Block `block` ≥ 2 from S starts per request.

        Returns:
            the attention, and [R, S] bool: the starts whose row has a slot at all.
        """
        K, S, table = self.K, self.S, self.block_table
        if self.fused:
            sight = later_sight_triton(
                starts.row, starts.position, self.last, self.own, table, self.prefix, self.words,
                block, self.token_block, self.max_position,
            )  # fmt: skip
        else:
            sight = self._later(block, starts)
        each = [S * K * r for r in range(self.requests + 1)]
        limit = min(self.newest_bound + 1 + (block - 1) * S, self.max_position) * K
        queries = PackedQueries(
            table,
            self.token_block * K,
            sight.query_start,
            each,
            sight.seq_len,
            [limit] * self.requests,
            sight.prefix_len,
            sight.words,
            sight.window_start,
        )
        return PagedAttention(self.caches, sight.entry, queries), sight.there

    def _later(self, block: int, starts: Starts) -> LaterSight:
        """What `later_sight_triton` works out."""
        K, S, size = self.K, self.S, self.token_block
        first_row = 1 + (block - 2) * S
        row, position = starts.row, starts.position  # [R, S]
        of_drafting_row = row == 0
        prefix = torch.where(
            of_drafting_row, self.last[:, None] * K + position + 1, self.prefix.gather(1, row)
        )
        width = self.own.shape[-1]
        path = self.words.gather(1, row[..., None].expand(-1, -1, width))
        path = path | self.own[row, position]  # [R, S, W]; row 0 owns no bits
        self.prefix = torch.cat([self.prefix, prefix], 1)
        self.words = torch.cat([self.words, path], 1)

        at = self.last[:, None] + first_row + self.rows  # [R, S] token positions to borrow
        there = at < self.max_position
        block_index = (at // size).clamp(max=self.block_table.shape[1] - 1)
        slot = self.block_table.gather(1, block_index).long() * size
        slot = torch.where(there, slot + at % size, -1)
        entry = torch.where(slot >= 0, slot * K, -K)[..., None] + self.k  # [R, S, K]

        own = self.own[first_row : first_row + S]  # [S, K, W]
        window = ((self.last + 1) * K).int()
        ahead = (block - 1) * S * K
        last = self.requests * S * K
        return LaterSight(
            entry=entry.flatten(0, 1),
            query_start=torch.arange(0, last + 1, S * K, dtype=torch.int32, device=at.device),
            prefix_len=prefix[..., None].expand(-1, -1, K).flatten().int(),
            words=(path[:, :, None] | own).flatten(0, 2),
            seq_len=(window + ahead).clamp(max=self.max_position * K),
            window_start=window,
            there=there,
        )


def window_words(num_blocks: int, num_starts: int, block_size: int) -> int:
    """int64 words that hold one bit for every position of the blocks after the first."""
    return max(1, -(-(num_blocks - 1) * num_starts * block_size // 64))
