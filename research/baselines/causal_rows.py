"""Causal attention metadata: committed tokens and a few drafted ones behind each request's newest.

A row lies in the slot of its place in the block table and sees all slots up to its own. The rows
behind the newest borrow the slots of the tokens to come, which are reserved for the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from vllm_specblock.drafters.common.draft_attention import PagedAttention
from vllm_specblock.drafters.interface import CommittedTokens


class CausalRows:
    """Builds the PagedAttention of each forward of a step; one entry per row.

    Args:
        caches: one [blocks, kv heads, block size, 2D] per drafter layer.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(self, caches: list[Tensor], max_position: int) -> None:
        self.caches, self.max_position = caches, max_position
        self.rows_per_token, self.word_counts = 1, {1}

    def step(self, rows: CommittedTokens) -> None:
        """Begin a step: later forwards stand behind the newest of `rows`."""
        self.newest, self.table = _newest(rows), rows.block_table
        self.block_size, self.bound = rows.block_size, rows.max_position

    def begin(self, requests: Tensor | None) -> None:
        """Say for which requests ([n] int64; None: all of the step) later forwards are."""
        self.position, self.block_table = self.newest, self.table
        if requests is not None:
            self.position, self.block_table = self.newest[requests], self.table[requests]

    def first(
        self, rows: CommittedTokens, count: int, keep_newest: bool
    ) -> tuple[PagedAttention, Tensor, Tensor]:
        """The rows (some of the step or all), and `count` more behind the newest of each request.

        Returns:
            the attention over the T rows, then the requests' count rows each; the position of each
            [T + R·count] int64; keep: those that a last layer keeps, request by request [R · m]
            int64, m being count, and one more with `keep_newest`: the newest first.
        """
        newest, requests = _newest(rows), len(rows.last)
        device, total = newest.device, len(rows.token)
        more, index, kv_slot = self._places(newest, rows.block_table, 0, count)
        position = torch.cat([rows.position, more.flatten()])
        keep = torch.arange(total, total + requests * count, device=device).view(requests, count)
        if keep_newest:
            keep = torch.cat([rows.last[:, None], keep], 1)
        # Two runs of queries per request: its rows, and those behind them.
        each = torch.arange(1, requests + 1, device=device) * count
        start = torch.cat([rows.row_start, (rows.row_start[-1] + each).int()])
        host = list(rows.row_start_host)
        host += [host[-1] + count * request for request in range(1, requests + 1)]
        bound = min(rows.max_position + 1 + count, self.max_position)
        ends = torch.cat([newest[:, 1] + 1, newest[:, 1] + 1 + count])
        ends = ends.clamp(max=self.max_position).int()
        see = (torch.cat([rows.index, index.flatten()]) + 1).int()
        mask_words = see.new_zeros(len(see), 1, dtype=torch.int64)
        queries = TreeAttentionBatch(
            torch.cat([rows.block_table, rows.block_table]),
            start,
            host,
            ends,
            bound,
            see,
            mask_words,
            ends,
        )
        kept = self._queries(rows.block_table, see[keep], bound)
        kv_index = torch.cat([rows.kv_slot, kv_slot.flatten()])[:, None]
        return PagedAttention(self.caches, kv_index, queries, kept), position, keep.flatten()

    def next(self, ahead: int) -> tuple[PagedAttention, Tensor]:
        """One row per request, `ahead` positions behind the first that followed the newest.

        Returns:
            the attention, and the rows' positions [n] int64.
        """
        position, index, kv_slot = self._places(self.position, self.block_table, ahead, 1)
        bound = min(self.bound + 2 + ahead, self.max_position)
        queries = self._queries(self.block_table, (index + 1).int(), bound)
        return PagedAttention(self.caches, kv_slot, queries), position[:, 0]

    def there(self, count: int) -> Tensor:
        """[n, count] bool: whether rows behind the newest have a slot at all."""
        ahead = torch.arange(1, count + 1, device=self.position.device)
        return self.position[:, :1] + ahead < self.max_position

    def _places(
        self, newest: Tensor, table: Tensor, ahead: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return position, index and slot [R, count] int64 of rows behind `newest` [R, 2].

        The slot is −1 where there is none.
        """
        first = newest[..., None] + 1 + ahead
        position, index = (first + torch.arange(count, device=newest.device)).unbind(1)
        block = (index // self.block_size).clamp(max=table.shape[1] - 1)
        kv_slot = table.gather(1, block).long() * self.block_size + index % self.block_size
        return position, index, torch.where(position < self.max_position, kv_slot, -1)

    def _queries(self, table: Tensor, see: Tensor, bound: int) -> TreeAttentionBatch:
        """As many queries of each request, see [R, m] int32: the entries that they see."""
        requests, each = see.shape
        start = torch.arange(0, requests * each + 1, each, dtype=torch.int32, device=see.device)
        host = [each * request for request in range(requests + 1)]
        ends = see[:, -1].clamp(max=self.max_position)
        mask_words = see.new_zeros(see.numel(), 1, dtype=torch.int64)
        return TreeAttentionBatch(
            table,
            start,
            host,
            ends,
            bound,
            see.flatten(),
            mask_words,
            ends,
        )


def _newest(rows: CommittedTokens) -> Tensor:
    """[R, 2] int64, position and index of each request's newest row."""
    return torch.stack([rows.position[rows.last], rows.index[rows.last]], 1)
