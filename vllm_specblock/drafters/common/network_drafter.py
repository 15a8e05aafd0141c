"""Base class of drafters with a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from vllm_specblock.drafters.common.chunked_advance import chunked_advance
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.feedback.calibration import DraftCalibration


class NetworkDrafter(Drafter):
    """A drafter with a network; `advance` returns the state from which the tree grows.

    Args:
        embed: [n] target token ids → [n, H], the target's own embedding.
        lookahead_slots: cache slots reserved after the root; default: N.
        layers: indices of the step's `states` that it reads, low layers first.

    Attributes:
        attention_builder: builds the attention of each forward; set by `bind`.
        entries_per_token: keys and values that a token leaves in each layer.
    """

    model: Any
    attention_builder: Any
    entries_per_token = 1

    def __init__(
        self,
        model: Any,
        embed: Callable[[torch.Tensor], torch.Tensor],
        options: Any,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
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
        heads = self.model.config.num_attention_heads
        self.attention_builder.warm_up(block_table, most_rows, heads)

    def advance(self, rows: CommittedTokens) -> None:
        self.attention_builder.step(rows)
        self.state = chunked_advance(rows, self._forward)  # [R, ..., H]

    @abstractmethod
    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        """Run the network on some rows; returns [n, ..., H], of each request's last row."""


def of_requests(requests: torch.Tensor | None, *of_step: torch.Tensor | None) -> tuple[Any, ...]:
    """Select rows of `requests` [n] int64 (None: all) from per-request tensors, or None."""
    if requests is None:
        return of_step
    return tuple(None if each is None else each[requests] for each in of_step)
