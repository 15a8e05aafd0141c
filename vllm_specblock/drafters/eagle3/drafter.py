"""EAGLE-3 drafter: an existing checkpoint under EAGLE-2's dynamic tree."""

from __future__ import annotations

import torch

from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder, PagedAttention
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.eagle3.growth import LevelRows, grow, level_shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.drafters.specblock.growth import expansion
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import NextStarts


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
        self.shape = level_shape(
            options, self.num_nodes, lookahead, self.model.config.draft_vocab_size
        )
        self.max_depth = self.shape.num_blocks

    def bind(self, caches: list[torch.Tensor]) -> None:
        starts, levels = self.shape.num_starts, self.shape.num_blocks
        self.attention_builder = DraftAttentionBuilder(
            caches, 1, starts, levels, self.max_model_len, path_rope=True, by_level=True
        )
        self.width = torch.tensor(self.shape.branching, device=caches[0].device)

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
        state, beta = of_requests(requests, self.state, self.beta)
        self.attention_builder.begin(requests)
        levels = expansion(self.shape, self.width, len(state))
        return grow(self.model, self.embed, levels, state, self._level, beta)

    def _level(self, level: int, starts: NextStarts) -> tuple[PagedAttention, LevelRows]:
        attend, rows = self.attention_builder.next(level, starts)
        return attend, LevelRows(rows.valid, rows.source, rows.base)
