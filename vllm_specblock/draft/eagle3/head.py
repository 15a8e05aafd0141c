"""The EAGLE-3 head: an existing checkpoint's drafter, a dynamic tree in place of its chain."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specblock.config import Eagle3Config
from vllm_specblock.draft.eagle3.growth import Growth, grow
from vllm_specblock.draft.eagle3.model import Attend, Eagle3Drafter
from vllm_specblock.draft.expand import Starts
from vllm_specblock.draft.head import CacheLayer, CommittedRows, Head
from vllm_specblock.draft.paged import BlockSight, PagedAttention
from vllm_specblock.draft.parts import advance_in_parts
from vllm_specblock.draft.sharpness import Sharpness
from vllm_specblock.tree import DraftTree


class Eagle3Head(Head):
    """Catch-up on the committed rows and level 1 are one forward; each later level is another.

    A level is to the cache what a block of one position is (`paged.py`).

    Args:
        drafter: the loaded model.
        embed: [n] target token ids → [n, H], the target's own embedding, which is used unless
            the checkpoint brings one that differs.
        options: how the tree grows.
        num_nodes: N.
        max_model_len: tokens of the longest request.
        spare_slots: cache slots reserved after the root; default: N.
        layers: which of a step's `states` are read, low layers first.
    """

    kind = "eagle3"

    def __init__(
        self,
        drafter: Eagle3Drafter,
        embed: Callable[[torch.Tensor], torch.Tensor],
        options: Eagle3Config,
        num_nodes: int,
        max_model_len: int,
        spare_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
    ):
        self.drafter, self.num_nodes = drafter, num_nodes
        drafter.share_embedding(embed)
        self.embed = embed if drafter.embed_tokens is None else drafter.embed_tokens
        self.max_model_len, self.layers = max_model_len, layers
        spare = num_nodes if spare_slots is None else spare_slots
        self.growth = Growth.of(options, num_nodes, spare, drafter.config.draft_vocab_size)
        self.max_depth = self.growth.depth
        if options.learn_sharpness:
            self.sharpness = Sharpness(drafter.lm_head.weight.device)

    def cache_layers(self) -> list[CacheLayer]:
        config = self.drafter.config
        return [CacheLayer(config.num_key_value_heads, config.head_dim, 1)]

    def bind(self, caches: list[torch.Tensor]) -> None:
        self.sight = BlockSight(
            caches, 1, self.growth.width, self.growth.depth, self.max_model_len, caches[0].device
        )

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:
        self.sight.warm_up(block_table, most_rows, self.drafter.config.num_attention_heads)

    def advance(self, rows: CommittedRows) -> None:
        self.sight.step(rows)
        self.state = advance_in_parts(rows, self._run)  # [R, H]
        self.position = self.sight.newest  # [R]
        self.beta = self.sharpness_of(rows)  # [R]

    def _run(self, rows: CommittedRows) -> torch.Tensor:
        attend, _ = self.sight.first(rows)
        return self.drafter.run(
            self.embed(rows.token),
            self.drafter.fuse(rows.features(self.layers)),
            rows.position,
            _per_row(attend),
            rows.last,
        )

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        state, position, beta = self.state, self.position, self.beta
        if requests is not None:
            state, position = state[requests], position[requests]
            beta = None if beta is None else beta[requests]
        self.sight.begin(requests)
        return grow(self.drafter, self.embed, self.growth, state, position, self._level, beta)

    def _level(self, level: int, rows: Starts) -> tuple[Attend, torch.Tensor]:
        there = self.sight.next(level, rows)
        return _per_row(there.attend), there.valid


def _per_row(attend: PagedAttention) -> Attend:
    """One position per row, without the dimension that counts them."""
    return lambda query, key, value: attend(0, query[:, None], key[:, None], value[:, None])[:, 0]
