"""EAGLE-3 drafter: an existing checkpoint under EAGLE-2's dynamic tree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.common.chunked_advance import chunked_advance
from vllm_specblock.drafters.common.paged_attention import PagedAttention
from vllm_specblock.drafters.eagle3.growth import DynamicTreeConfig, grow
from vllm_specblock.drafters.eagle3.model import AttendInLayer, Eagle3Model
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.drafters.specblock.draft_attention import DraftAttentionBuilder
from vllm_specblock.drafters.specblock.tree_shape import Starts
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.tree import DraftTree


class Eagle3Drafter(Drafter):
    """Catch-up on the committed rows and level 1 are one forward; each later level is another.

    A level is to the cache what a block of one position is (`draft_attention.py`).

    Args:
        model: the loaded model.
        embed: [n] target token ids → [n, H], the target's own embedding, which is used unless
            the checkpoint brings one that differs.
        options: how the tree grows.
        num_nodes: N.
        max_model_len: tokens of the longest request.
        lookahead_slots: cache slots reserved after the root; default: N.
        layers: which of a step's `states` are read, low layers first.
    """

    kind = "eagle3"
    model: Eagle3Model

    def __init__(
        self,
        model: Eagle3Model,
        embed: Callable[[torch.Tensor], torch.Tensor],
        options: Eagle3Config,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        self.model, self.num_nodes = model, num_nodes
        model.share_embedding(embed)
        self.embed = embed if model.embed_tokens is None else model.embed_tokens
        self.max_model_len, self.layers = max_model_len, layers
        lookahead = num_nodes if lookahead_slots is None else lookahead_slots
        self.growth = DynamicTreeConfig.of(
            options, num_nodes, lookahead, model.config.draft_vocab_size
        )
        self.max_depth = self.growth.depth
        if options.calibrate_drafts:
            self.calibration = DraftCalibration(model.norm.weight.device)

    def cache_layers(self) -> list[CacheLayer]:
        config = self.model.config
        layer = CacheLayer(config.num_key_value_heads, config.head_dim, 1)
        return [layer] * config.num_hidden_layers

    def bind(self, caches: list[torch.Tensor]) -> None:
        self.attention_builder = DraftAttentionBuilder(
            caches, 1, self.growth.width, self.growth.depth, self.max_model_len, caches[0].device
        )

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:
        self.attention_builder.warm_up(
            block_table, most_rows, self.model.config.num_attention_heads
        )

    def advance(self, rows: CommittedTokens) -> None:
        self.attention_builder.step(rows)
        self.state = chunked_advance(rows, self._run)  # [R, H]
        self.position = self.attention_builder.newest  # [R]
        self.beta = self.beta_of(rows)  # [R]

    def _run(self, rows: CommittedTokens) -> torch.Tensor:
        attend, _ = self.attention_builder.first(rows)
        return self.model.run(
            self.embed(rows.token),
            self.model.fuse(rows.features(self.layers)),
            rows.position,
            _per_row(attend),
            rows.last,
        )

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        state, position, beta = self.state, self.position, self.beta
        if requests is not None:
            state, position = state[requests], position[requests]
            beta = None if beta is None else beta[requests]
        self.attention_builder.begin(requests)
        return grow(self.model, self.embed, self.growth, state, position, self._level, beta)

    def _level(self, level: int, rows: Starts) -> tuple[AttendInLayer, torch.Tensor]:
        there = self.attention_builder.next(level, rows)
        return _per_row(there.attend), there.valid


def _per_row(attend: PagedAttention) -> AttendInLayer:
    """One position per row, without the dimension that counts them."""
    return lambda layer, *states: attend(layer, *(x[:, None] for x in states))[:, 0]
