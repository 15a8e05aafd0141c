"""Base class of drafters with a network, which read long prompts in parts of bounded memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import torch

from vllm_specblock.committed import MAX_ROWS, CommittedTokens, in_parts
from vllm_specblock.drafters.interface import CacheLayer, Drafter
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.triton_kernels.attention.tree_attention_batch import packing_on_cpu
from vllm_specblock.triton_kernels.warm_up import compile_attention


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
        for words, window in product(builder.word_counts, {*config.layer_windows}):
            sizes = words, longest, seen
            compile_attention(query, cache, block_table, *sizes, window=window, packing=packing)

    def advance(self, rows: CommittedTokens) -> None:
        self.attention_builder.step(rows)
        self.state = in_parts(rows, self._forward)  # [R, ..., H]

    @abstractmethod
    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        """Run the network on some rows; returns [n, ..., H], of each request's last row."""
