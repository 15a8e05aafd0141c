"""The SpecBlock drafter: M forwards of a two-layer drafter, and a tree (paper, §3.1 and §3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from vllm_specblock.config import SpecBlockConfig
from vllm_specblock.drafters.common.chunked_advance import chunked_advance
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.drafters.specblock.draft_attention import DraftAttentionBuilder
from vllm_specblock.drafters.specblock.fused_growth import expansion
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import refresh
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.tree import DraftTree


class SpecBlockDrafter(Drafter):
    """Catch-up on the committed rows and block 1 are one forward; each later block is another.

    Args:
        model: the loaded model.
        embed: [n] target token ids → [n, H], the target's own embedding.
        options: how the tree grows.
        num_nodes: N.
        max_model_len: tokens of the longest request.
        lookahead_slots: cache slots reserved after the root; default: N.
        layers: which of a step's `states` are the low, mid and top one.
    """

    kind = "specblock"
    model: SpecBlockModel

    def __init__(
        self,
        model: SpecBlockModel,
        embed: Callable[[torch.Tensor], torch.Tensor],
        options: SpecBlockConfig,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        self.model, self.embed, self.num_nodes = model, embed, num_nodes
        self.max_model_len, self.layers = max_model_len, layers
        blocks = min(options.num_blocks, num_nodes + 1)
        # Later blocks borrow one reserved slot per start.
        lookahead = num_nodes if lookahead_slots is None else lookahead_slots
        starts = min(options.num_starts, max(1, lookahead // max(1, blocks - 1)))
        self.K = model.config.block_size
        most = model.config.draft_vocab_size  # more children than it can name there are not
        a, b, c, d = (min(width, most) for width in options.branching)
        self.shape = TreeShape(self.K, blocks, starts, (a, b, c, d), num_nodes)
        self.max_depth = min(num_nodes, blocks * self.K)
        if options.calibrate_drafts:
            self.calibration = DraftCalibration(model.lm_head.weight.device)

    def cache_layers(self) -> list[CacheLayer]:
        config = self.model.config
        layer = CacheLayer(config.num_key_value_heads, config.head_dim, config.block_size)
        return [layer] * config.num_hidden_layers

    def bind(self, caches: list[torch.Tensor]) -> None:
        self.attention_builder = DraftAttentionBuilder(
            caches,
            self.K,
            self.shape.num_starts,
            self.shape.num_blocks,
            self.max_model_len,
            caches[0].device,
            self.model.config.block_rope == "path",
        )
        self.width = torch.tensor(self.shape.branching, device=caches[0].device)

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:
        self.attention_builder.warm_up(
            block_table, most_rows, self.model.config.num_attention_heads
        )

    def refresh(self, tensors: Mapping[str, torch.Tensor]) -> None:
        refresh(self.model, tensors)

    def advance(self, rows: CommittedTokens) -> None:
        self.attention_builder.step(rows)
        self.hidden = chunked_advance(rows, self._forward)  # [R, K, H]
        self.beta = self.beta_of(rows)  # [R]

    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        attend, base = self.attention_builder.first(rows)
        condition = self.model.condition(rows.features(self.layers))
        return self.model(condition, self.embed(rows.token), base, attend, rows.last)

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        model, shape, beta = self.model, self.shape, self.beta
        drafted = self.hidden[:, None]  # [R, rows so far, K, H]; row 0 is the drafting row
        if requests is not None:
            drafted = drafted[requests]
            beta = None if beta is None else beta[requests]
        growth = expansion(shape, self.width, len(drafted))
        growth.first_block(*model.candidates(drafted[:, 0], shape.width, beta))

        self.attention_builder.begin(requests)
        for block in range(2, shape.num_blocks + 1):
            starts = growth.starts(block)
            rows = self.attention_builder.next(block, starts)
            condition = drafted.flatten(0, 2)[rows.source]  # [R·S, H]
            embedded = self.embed(starts.token.flatten())
            hidden = model(condition, embedded, rows.base, rows.attend)
            hidden = hidden.unflatten(0, starts.token.shape)  # [R, S, K, H]
            candidates = model.candidates(hidden, shape.width, beta)
            growth.next_block(replace(starts, valid=rows.valid), block, *candidates)
            if block < shape.num_blocks:
                drafted = torch.cat([drafted, hidden], 1)
        return growth.finish()
