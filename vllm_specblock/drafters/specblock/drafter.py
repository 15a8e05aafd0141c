"""The SpecBlock drafter: M forwards of a two-layer drafter, and a tree (paper, §3.1 and §3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.growth import Expansion, expansion
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import Growing, NextStarts, TreeShape


class SpecBlockDrafter(NetworkDrafter):
    """Catch-up on the committed rows and block 1 are one forward; each later block is another."""

    kind = "specblock"
    model: SpecBlockModel
    expand: Callable[[TreeShape, torch.Tensor, int], Expansion | Growing] = staticmethod(expansion)

    def set_shape(self, options: SpecBlockConfig, lookahead: int) -> None:
        num_nodes, config = self.num_nodes, self.model.config
        blocks = min(options.num_blocks, num_nodes + 1)
        # Later blocks borrow one reserved slot per start.
        starts = min(options.num_starts, max(1, lookahead // max(1, blocks - 1)))
        self.entries_per_token = config.block_size
        most = config.draft_vocab_size  # at most the draft vocabulary
        a, b, c, d = (min(width, most) for width in options.branching)
        self.shape = TreeShape(config.block_size, blocks, starts, (a, b, c, d), num_nodes)
        self.first_block = config.block_size if blocks > 1 else 0
        self.max_depth = min(num_nodes, blocks * config.block_size)

    def bind(self, caches: list[torch.Tensor]) -> None:
        path_rope = self.model.config.block_rope == "path"
        self.attention_builder = DraftAttentionBuilder(
            caches, self.shape, self.max_model_len, path_rope
        )
        self.width = torch.tensor(self.shape.branching, device=caches[0].device)

    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        attend, base = self.attention_builder.first(rows)
        condition = self.model.condition(rows.features(self.layers))
        return self.model(condition, self.embed(rows.token), base, attend, rows.last)

    def draft(self) -> DraftTree:
        model, beta = self.model, self.beta
        shape = replace(self.shape, num_blocks=1) if self.brief else self.shape
        drafted = self.state[:, None]  # [R, rows so far, K, H]; row 0 is the drafting row
        growth = self.expand(shape, self.width, len(drafted))
        grown = growth.attach(None, *model.candidates(drafted, shape.width, beta))

        self.attention_builder.begin()
        block = 1
        while isinstance(grown, NextStarts):
            block += 1
            attend, rows = self.attention_builder.next(block, grown)
            embedded = self.embed(grown.token.flatten())
            condition = drafted.flatten(0, 2)
            hidden = model(condition, embedded, rows.base, attend, rows=rows.source)
            hidden = hidden.unflatten(0, grown.token.shape)  # [R, S, K, H]
            candidates = model.candidates(hidden, shape.width, beta)
            grown = growth.attach(grown._replace(valid=rows.valid), *candidates)
            if block < shape.num_blocks:
                drafted = torch.cat([drafted, hidden], 1)
        return grown if isinstance(grown, DraftTree) else DraftTree(*grown[:-1])
