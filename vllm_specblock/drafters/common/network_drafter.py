"""Base class of drafters with a network, which read long prompts in parts of bounded memory."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch

from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.triton_kernels.attention.tree_attention_batch import packing_on_cpu
from vllm_specblock.triton_kernels.warm_up import compile_attention

MAX_ROWS = 512
"""Rows of one part. With K = 4 positions that is enough for matrix units to be busy."""


class NetworkDrafter(Drafter):
    """A drafter with a network; `advance` returns the state from which the tree grows.

    Attributes:
        attention_builder: builds the attention of each forward; set by `bind`. It has `caches`,
            `rows_per_token` of the longest forward, and `word_counts`, the W of its masks.
        entries_per_token: keys and values that a token leaves in each layer.
    """

    model: Any
    attention_builder: Any
    entries_per_token = 1

    def __init__(
        self,
        model: Any,
        embed: Callable[[torch.Tensor], torch.Tensor],  # the target's own: [n] ids → [n, H]
        options: Any,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,  # cache slots reserved after the root; default: N
        layers: tuple[int, ...] = (0, 1, 2),  # of the step's `states`, low ones first
    ) -> None:
        self.model, self.embed, self.num_nodes = model, embed, num_nodes
        self.max_model_len, self.layers = max_model_len, layers
        self.device = next(chain(model.parameters(), model.buffers())).device
        if options.calibrate_drafts:
            self.calibration = DraftCalibration(self.device)
        self.set_shape(options, num_nodes if lookahead_slots is None else lookahead_slots)

    @abstractmethod
    def set_shape(self, options: Any, lookahead: int) -> None:
        """Set `max_depth` and the shape of every tree, for so many slots after the root."""

    def cache_layers(self) -> list[CacheLayer]:
        config = self.model.config
        layer = CacheLayer(config.num_key_value_heads, config.head_dim, self.entries_per_token)
        return [layer] * config.num_hidden_layers

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:
        builder, config = self.attention_builder, self.model.config
        cache = builder.caches[0]
        query = cache.new_empty(1, config.num_attention_heads, config.head_dim)
        longest = min(most_rows, MAX_ROWS) * builder.rows_per_token
        seen, packing = self.max_model_len * self.entries_per_token, packing_on_cpu(cache)
        for words in builder.word_counts:
            compile_attention(query, cache, block_table, words, longest, seen, packing=packing)

    def advance(self, rows: CommittedTokens) -> None:
        self.attention_builder.step(rows)
        self.state = in_parts(rows, self._forward)  # [R, ..., H]

    @abstractmethod
    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        """Run the network on some rows; returns [n, ..., H], of each request's last row."""


def in_parts(
    rows: CommittedTokens, forward: Callable[[CommittedTokens], torch.Tensor]
) -> torch.Tensor:
    """Call `forward` on one part after the other; earlier ones are in the cache by then.

    Thousands of prompt rows of K positions, in an MLP's several copies, would take gigabytes.

    Args:
        forward: takes a part with n requests, returns [n, ...] of the last row of each.
    """
    bounds = rows.row_start_host
    if bounds[-1] <= MAX_ROWS:
        return forward(rows)
    # Between requests, or within one that is too long. Requests with padding have at most 256
    # rows, so padding is never a part of its own.
    cuts = [0]
    for start, end in pairwise(bounds):
        if end - cuts[-1] > MAX_ROWS and start > cuts[-1]:
            cuts.append(start)
        while end - cuts[-1] > MAX_ROWS:
            cuts.append(cuts[-1] + MAX_ROWS)
    found = []
    for start, end in pairwise([*cuts, bounds[-1]]):
        out = forward(part_of(rows, start, end))
        unfinished = bounds[bisect_left(bounds, end)] > end  # the last request goes on
        found.append(out[: len(out) - unfinished])
    return torch.cat(found)


def part_of(rows: CommittedTokens, start: int, end: int) -> CommittedTokens:
    """Rows `start` … `end` − 1."""
    bounds = rows.row_start_host
    first, after = bisect_right(bounds, start) - 1, bisect_left(bounds, end)
    return replace(
        rows,
        **{name: getattr(rows, name)[start:end] for name in rows.PER_ROW},
        **{name: getattr(rows, name)[first:after] for name in rows.PER_REQUEST},
        row_start=rows.row_start[first : after + 1].clamp(start, end) - start,
        row_start_host=[min(max(n, start), end) - start for n in bounds[first : after + 1]],
        last=rows.last[first:after].clamp(max=end - 1) - start,
    )
