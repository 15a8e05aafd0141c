"""Attention of a drafter's forwards over a paged cache of K entries per token.

Entry i·K + k is position k of row i. A row of block 1 sees all entries of earlier rows and its own
up to k: causal attention. A row of a later block sees the entries before its start, the positions
on its path and its own up to k: a prefix length and a few bits (paper, §3.1 and §3.2).

Later blocks borrow the slots of the request's next tokens, which are reserved for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specblock.candidates import NEVER
from vllm_specblock.commit import store_kv
from vllm_specblock.committed import MAX_ROWS, CommittedTokens
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.first_block_metadata import first_block_metadata
from vllm_specblock.triton_kernels.drafting.later_block_metadata import (
    CommittedRows,
    DraftedRows,
    LaterBlockMetadata,
    later_block_metadata,
)
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits


class PagedAttention:
    """The `attend` callable of one drafter forward: stores every row, then attends."""

    def __init__(
        self,
        caches: list[torch.Tensor],  # [blocks, kv heads, block size · K, 2D] per drafter layer
        kv_index: torch.Tensor,  # [T, K] int64, where positions are stored; negative for padding
        queries: list[TreeAttentionBatch],  # what the rows see in each layer
        windows: Sequence[int | None] | None = None,  # see `NetworkShape.layer_windows`
    ) -> None:
        self.caches, self.kv_index = caches, kv_index.flatten()
        self.packing = packing_on_cpu(caches[0])
        self.queries, self.windows = queries, windows or [None] * len(caches)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [Q..., heads, D], key and value [T..., kv heads, D] → [Q..., heads, D]."""
        cache = self.caches[layer]
        key, value = key.flatten(0, -3), value.flatten(0, -3)
        store_kv(cache, self.kv_index, key, value, packing=self.packing)
        rows, scale, window = query.flatten(0, -3), query.shape[-1] ** -0.5, self.windows[layer]
        out = self.queries[layer].attend(rows, cache, scale, window=window, packing=self.packing)
        return out.view_as(query)


class DraftAttentionBuilder:
    """Builds the PagedAttention of each block of a step.

    Args:
        caches: as PagedAttention.
        shape: of the trees; K and S are its block size and starts.
        max_position: positions at or beyond it have no slot (the model's length limit).
        path_rope: RoPE counts the tokens on the path to a later block's row; otherwise all rows
            have the base of block 1's drafting row.
        windows: as PagedAttention, with K = 1.
    """

    def __init__(
        self,
        caches: list[torch.Tensor],
        shape: TreeShape,
        max_position: int,
        path_rope: bool,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.caches, self.max_position, self.path_rope = caches, max_position, path_rope
        self.windows = windows
        self.K, self.S, self.by_level = shape.block_size, shape.num_starts, shape.by_level
        # Row 0 is the drafting row of block 1: later blocks see it in their prefix, so it owns no
        # bits. Row 1 + i owns bits i·K … i·K + K − 1 of the window.
        rows, K = 1 + (shape.num_blocks - 1) * self.S, self.K
        sees = torch.zeros(rows, K, max(1, rows - 1), K, dtype=torch.bool)
        later = torch.arange(rows - 1)
        sees[1 + later, :, later] = torch.ones(K, K, dtype=torch.bool).tril()
        self.own = pack_bits(sees.flatten(2)).to(caches[0].device)  # [rows, K, W]
        self.rows_per_token, self.word_counts = K, {self.own.shape[-1]}
        # No row of block 1 has bits.
        self.no_bits = self.own.new_zeros(MAX_ROWS * K, self.own.shape[-1])

    def step(self, rows: CommittedTokens) -> None:
        """Begin a step; later blocks follow the last of `rows`."""
        # Not the rows themselves: a prompt's states may be hundreds of megabytes.
        self.committed = CommittedRows(rows.position, rows.index, rows.last, rows.block_table)
        self.token_block, self.newest_bound = rows.block_size, rows.max_position

    def first(self, rows: CommittedTokens) -> tuple[PagedAttention, torch.Tensor]:
        """Return the attention of block 1, and RoPE's position [T] int64 of each row's first.

        rows: of the step, all or some; those before them are in the cache already.
        """
        K, table, requests = self.K, rows.block_table, len(rows.row_start_host) - 1
        of = first_block_metadata(rows, K)
        ends, limit = of.ends, (rows.max_position + 1) * K

        def sees(start: torch.Tensor, host: list[int], prefix: torch.Tensor) -> TreeAttentionBatch:
            words = self.no_bits[: len(prefix)]
            return TreeAttentionBatch(table, start, host, ends, limit, prefix, words, ends)

        queries = sees(of.query_start, [row * K for row in rows.row_start_host], of.prefix_len)
        kept = sees(of.kept_start, [K * r for r in range(requests + 1)], of.kept_prefix)
        of_layers = [queries] * (len(self.caches) - 1) + [kept]
        return PagedAttention(self.caches, of.kv_index, of_layers, self.windows), of.base

    def begin(self) -> None:
        """Begin the later blocks of a step."""
        row, (rows, _, width) = self.committed.last, self.own.shape
        prefix = row.new_empty(len(row), rows)
        reach = torch.empty_like(prefix) if self.path_rope else None
        # Each block fills in its own rows.
        bits = row.new_empty(len(row), rows, width)
        self.drafted = DraftedRows(self.own, prefix, bits, reach)

    def next(self, block: int, starts: NextStarts) -> tuple[PagedAttention, LaterBlockMetadata]:
        """Return the attention of block `block` ≥ 2 from S starts per request, and its rows."""
        K, S, table = self.K, self.S, self.committed.block_table
        given = block, self.token_block, self.max_position, self.by_level
        of = later_block_metadata(starts, self.committed, self.drafted, *given)
        each = [S * K * r for r in range(len(table) + 1)]
        limit = min(self.newest_bound + 1 + (block - 1) * S, self.max_position) * K
        seen = of.seq_len, limit, of.prefix_len, of.mask_words, of.tree_start
        queries = [TreeAttentionBatch(table, of.query_start, each, *seen)] * len(self.caches)
        return PagedAttention(self.caches, of.kv_index, queries, self.windows), of


class BlockRows:
    """Builds the PagedAttention of a step's blocks, which borrow the slots of the tokens to come.

    Args:
        size: S, rows of a block.
        causal: of each layer, whether its rows see no later row of their block.
        windows: see `NetworkShape.layer_windows`. Without `causal` all rows of a block see as many
            entries before it.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(
        self,
        caches: list[torch.Tensor],
        size: int,
        causal: Sequence[bool],
        windows: Sequence[int | None],
        max_position: int,
    ) -> None:
        self.caches, self.size, self.max_position = caches, size, max_position
        self.packing, self.causal = packing_on_cpu(caches[0]), causal
        self.windows = [
            window if window is None or alone else window + size
            for window, alone in zip(windows, causal)
        ]
        self.offset = torch.arange(size, device=caches[0].device)
        sees = torch.ones(size, size, dtype=torch.bool, device=caches[0].device)
        words = {False: pack_bits(sees), True: pack_bits(sees.tril())}
        self.mask_words = {each: words[each] for each in {*causal}}  # [S, W]
        self.rows_per_token, self.word_counts = size, {words[True].shape[-1]}

    def drafted(self, logprob: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return logprob [R, K, ...] of rows at position [R, K] without those that have no slot."""
        lost = (position >= self.max_position).view(*position.shape, *[1] * (logprob.dim() - 2))
        return logprob.masked_fill(lost, NEVER)

    def blocks(self, rows: CommittedTokens) -> tuple[PagedAttention, torch.Tensor]:
        """Return the attention over R·S rows, block by block, and their positions [R, S] int64.

        A block follows the newest row of each request.
        """
        table, size, last, count = rows.block_table, self.size, rows.last, len(rows.last)
        first = rows.index[last] + 1
        index = first[:, None] + self.offset
        position = rows.position[last, None] + 1 + self.offset
        block = (index // rows.block_size).clamp(max=table.shape[1] - 1)
        kv_slot = table.gather(1, block).long() * rows.block_size + index % rows.block_size
        kv_slot = torch.where(position < self.max_position, kv_slot, -1)
        first = first.int()
        ahead = (
            table,
            torch.arange(0, count * size + 1, size, dtype=torch.int32, device=last.device),
            [size * request for request in range(count + 1)],
            (first + size).clamp(max=self.max_position),
            min(rows.max_position + 1 + size, self.max_position),
            first.repeat_interleave(size),  # dense, which a view of one request is not
        )
        queries = {
            each: TreeAttentionBatch(*ahead, words.repeat(count, 1), first)
            for each, words in self.mask_words.items()
        }
        of_layers = [queries[each] for each in self.causal]
        return PagedAttention(self.caches, kv_slot.view(-1, 1), of_layers, self.windows), position
