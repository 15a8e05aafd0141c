"""The SpecBlock head: M forwards of a two-layer drafter, and a tree (paper, §3.1 and §3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from vllm_specblock.config import SpecBlockConfig
from vllm_specblock.draft.expand import Shape, expansion
from vllm_specblock.draft.head import CacheLayer, CommittedRows, Head
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.draft.paged import BlockSight
from vllm_specblock.draft.parts import advance_in_parts
from vllm_specblock.draft.refresh import refresh
from vllm_specblock.draft.sharpness import Sharpness
from vllm_specblock.tree import DraftTree


class SpecBlockHead(Head):
    """Catch-up on the committed rows and block 1 are one forward; each later block is another.

    Args:
        drafter: the loaded model.
        embed: [n] target token ids → [n, H], the target's own embedding.
        options: how the tree grows.
        num_nodes: N.
        max_model_len: tokens of the longest request.
        spare_slots: cache slots reserved after the root; default: N.
        layers: which of a step's `states` are the low, mid and top one.
    """

    kind = "specblock"

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        embed: Callable[[torch.Tensor], torch.Tensor],
        options: SpecBlockConfig,
        num_nodes: int,
        max_model_len: int,
        spare_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
    ):
        self.drafter, self.embed, self.num_nodes = drafter, embed, num_nodes
        self.max_model_len, self.layers = max_model_len, layers
        blocks = min(options.num_blocks, num_nodes + 1)
        # Later blocks borrow one reserved slot per start.
        spare = num_nodes if spare_slots is None else spare_slots
        starts = min(options.num_starts, max(1, spare // max(1, blocks - 1)))
        self.K = drafter.config.block_size
        most = drafter.config.draft_vocab_size  # more children than it can name there are not
        widths = tuple(min(width, most) for width in options.branching)
        by_rank = options.start_order == "rank"
        self.shape = Shape(self.K, blocks, starts, widths, num_nodes, by_rank)
        self.max_depth = min(num_nodes, blocks * self.K)
        if options.learn_sharpness:
            self.sharpness = Sharpness(drafter.lm_head.weight.device)

    def cache_layers(self) -> list[CacheLayer]:
        config = self.drafter.config
        layer = CacheLayer(config.num_key_value_heads, config.head_dim, config.block_size)
        return [layer] * config.num_hidden_layers

    def bind(self, caches: list[torch.Tensor]) -> None:
        self.sight = BlockSight(
            caches,
            self.K,
            self.shape.num_starts,
            self.shape.num_blocks,
            self.max_model_len,
            caches[0].device,
            self.drafter.config.block_rope == "path",
        )
        self.width = torch.tensor(self.shape.branching, device=caches[0].device)

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:
        self.sight.warm_up(block_table, most_rows, self.drafter.config.num_attention_heads)

    def refresh(self, tensors: Mapping[str, torch.Tensor]) -> None:
        refresh(self.drafter, tensors)

    def advance(self, rows: CommittedRows) -> None:
        self.sight.step(rows)
        self.hidden = advance_in_parts(rows, self._forward)  # [R, K, H]
        self.beta = self.sharpness_of(rows)  # [R]

    def _forward(self, rows: CommittedRows) -> torch.Tensor:
        attend, base = self.sight.first(rows)
        condition = self.drafter.condition(rows.features(self.layers))
        return self.drafter(condition, self.embed(rows.token), base, attend, rows.last)

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        drafter, shape, beta = self.drafter, self.shape, self.beta
        drafted = self.hidden[:, None]  # [R, rows so far, K, H]; row 0 is the drafting row
        if requests is not None:
            drafted = drafted[requests]
            beta = None if beta is None else beta[requests]
        growth = expansion(shape, self.width, len(drafted))
        growth.first_block(*drafter.candidates(drafted[:, 0], shape.width, beta))

        self.sight.begin(requests)
        for block in range(2, shape.num_blocks + 1):
            starts = growth.starts(block)
            rows = self.sight.next(block, starts)
            condition = drafted.flatten(0, 2)[rows.source]  # [R·S, H]
            embedded = self.embed(starts.token.flatten())
            hidden = drafter(condition, embedded, rows.base, rows.attend)
            hidden = hidden.unflatten(0, starts.token.shape)  # [R, S, K, H]
            candidates = drafter.candidates(hidden, shape.width, beta)
            growth.next_block(replace(starts, valid=rows.valid), block, *candidates)
            if block < shape.num_blocks:
                drafted = torch.cat([drafted, hidden], 1)
        return growth.finish()
