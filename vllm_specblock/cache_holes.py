"""Cache blocks that paused drafters have not written, and block tables without them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.triton_kernels.kv_cache.mask_holes import RowsToWrite, mask_holes


class CacheHoles:
    """Incomplete cache blocks, which later requests may reuse.

    Keys carry their RoPE positions, so a table without the block masks it exactly. The host reads
    `any` alone.

    Args:
        num_blocks: cache blocks of the engine.
        masks: [2, requests] int64, by batch row; blind: [S] bool, by request slot; see `mask`.
    """

    def __init__(self, num_blocks: int, block_size: int, masks: Tensor, blind: Tensor) -> None:
        self.block_size, self.masks, self.blind = block_size, masks, blind
        # The last entry is for rows without a slot.
        self.missing = torch.full((num_blocks + 1,), block_size, device=masks.device)
        self.skips = 0
        # 2 · `skips` at the time of the last mask, plus 1 if any block was incomplete.
        self.seen = torch.zeros(1, dtype=torch.int64, pin_memory=masks.is_cuda)

    @property
    def any(self) -> bool:
        """Whether a block may be incomplete, as far as the host knows; not for a graph."""
        if self.masks.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.skips > 0 and int(self.seen) != 2 * self.skips  # a host tensor

    def skip(self, kv_slot: Tensor) -> None:
        """Drafters do not write the rows in `kv_slot` [T] int64; −1: no row."""
        block = (kv_slot // self.block_size).remainder(len(self.missing))  # rounds down: −1 is last
        self.missing.scatter_reduce_(0, block, kv_slot % self.block_size, "amin")
        self.skips += 1

    def mask(self, table: Tensor, first: Tensor, last: Tensor, req_idx: Tensor) -> bool:
        """Apply `mask_holes` to the tables of requests; write `masks`, and `blind`.

        A blind request cannot draft: all its rows lie in an incomplete block, which stays.

        Args:
            table, first, last: as in `RowsToWrite`.
            req_idx: [R] int64.

        Returns:
            whether a request may have an incomplete block; always on a GPU.
        """
        self.masks.zero_()
        found = table.is_cuda or bool((self.missing[table.long()] < self.block_size).any())
        if found:
            rows = RowsToWrite(self.missing, table, first, last, *self.masks[:, : len(table)])
            self.blind[req_idx] = mask_holes(rows, self.block_size)
        incomplete = (self.missing[:-1] < self.block_size).any() + 2 * self.skips
        self.seen.copy_(incomplete, non_blocking=True)
        return found

    def masked(self, rows: CommittedTokens) -> CommittedTokens:
        """Return rows whose tables were not masked with masked ones."""
        table, first = rows.block_table.clone(), rows.position[rows.row_start[:-1].long()]
        if not self.mask(table, first, rows.position[rows.last], rows.req_idx):
            return rows
        hidden, start = self.masks[:, : len(table)]
        request = rows.request()
        index = rows.position - hidden[request]
        kv_slot = rows.kv_slot.masked_fill(rows.position < start[request], -1)
        return replace(rows, index=index, kv_slot=kv_slot, block_table=table)
