"""EAGLE-3 drafter: an existing checkpoint under EAGLE-2's dynamic tree."""

from __future__ import annotations

import torch

from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder, PagedAttention
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.eagle3.growth import grow, limits_of
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.grow_level import NextRows


class Eagle3Drafter(NetworkDrafter):
    """Catch-up on the committed rows and level 1 are one forward; each later level is another.

    To the cache, a level is a block of one position (`draft_attention.py`).
    """

    kind = "eagle3"
    model: Eagle3Model

    def set_shape(self, options: Eagle3Config, lookahead: int) -> None:
        self.model.share_embedding(self.embed)
        if self.model.embed_tokens is not None:
            self.embed = self.model.embed_tokens
        self.growth = limits_of(
            options, self.num_nodes, lookahead, self.model.config.draft_vocab_size
        )
        self.max_depth = self.growth.depth

    def bind(self, caches: list[torch.Tensor]) -> None:
        self.attention_builder = DraftAttentionBuilder(
            caches, 1, self.growth.width, self.growth.depth, self.max_model_len
        )

    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        attend, _ = self.attention_builder.first(rows)
        return self.model.run(
            self.embed(rows.token),
            self.model.fuse(rows.features(self.layers)),
            rows.position,
            attend,
            rows.last,
        )

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        builder = self.attention_builder
        newest = builder.position[builder.row]
        state, position, beta = of_requests(requests, self.state, newest, self.beta)
        builder.begin(requests)

        def attention(level: int, rows: NextRows) -> tuple[PagedAttention, torch.Tensor]:
            attend, there = builder.next(level, rows)
            return attend, there.valid

        return grow(self.model, self.embed, self.growth, state, position, attention, beta)
