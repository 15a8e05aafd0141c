"""A batch of queries over a paged cache, described once and attended by every layer."""

from __future__ import annotations

import itertools

import torch

from .tree_attention import tree_attention
from .tree_attention_reference import AttentionPlan, attend_reference, plan_reference


class PackedQueries:
    """Queries of R requests, one request after the other, and what each of them sees.

    Query t of request r sees cache entries 0 … prefix_len[t] − 1 of its request, and entry
    window_start[r] + j where bit j of words[t] is set.

    Args (T queries, R requests, W words):
        block_table: [R, max blocks] int32.
        block_size: cache entries in one block.
        query_start: [R+1] int32, and `query_start_host`, the same on the host.
        seq_len: [R] int32, entries beyond which no query of the request sees anything;
            `seq_len_host`, an upper bound of it on the host.
        prefix_len: [≥T] int32.
        words: [≥T, W] int64.
        window_start: [≥R] int32.
        max_seq_len: bound of every `seq_len` for as long as the launch may be replayed; by
            default that of `seq_len_host`, which a captured graph would outgrow.

    On a CPU the first layer works out gather indices and the mask, for all layers.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        block_size: int,
        query_start: torch.Tensor,
        query_start_host: list[int],
        seq_len: torch.Tensor,
        seq_len_host: list[int],
        prefix_len: torch.Tensor,
        words: torch.Tensor,
        window_start: torch.Tensor,
        max_seq_len: int | None = None,
    ):
        self.block_table, self.query_start, self.seq_len = block_table, query_start, seq_len
        self.prefix_len, self.words, self.window_start = prefix_len, words, window_start
        self.block_size = block_size
        self.query_start_host, self.seq_len_host = query_start_host, seq_len_host
        self.max_seq_len = max_seq_len or max(seq_len_host)
        self.max_query_len = max(end - start for start, end in itertools.pairwise(query_start_host))
        self.plan: AttentionPlan | None = None

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: [T, heads, D].
            kv_cache: [blocks, kv heads, block size, 2D], keys first.
            scale: factor on the dot products.
            out: [T, heads, D] to write into; made if not given.
        """
        if out is None:
            out = torch.empty_like(query)
        if query.is_cuda:
            return tree_attention(
                query, kv_cache, self.block_table, self.query_start, self.max_query_len,
                self.seq_len, self.max_seq_len, self.prefix_len, self.words, self.window_start,
                scale, out,
            )  # fmt: skip
        if self.plan is None:
            self.plan = plan_reference(
                self.block_table, self.block_size, self.query_start_host, self.seq_len_host,
                self.prefix_len, self.words, self.window_start, query.dtype,
            )  # fmt: skip
        return attend_reference(query, kv_cache, self.plan, scale, out)
