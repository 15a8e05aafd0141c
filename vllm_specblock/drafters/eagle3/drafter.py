"""EAGLE-3 drafter: an existing checkpoint under EAGLE-2's dynamic tree (arXiv 2406.16858).

The best nodes of a level are the rows of the next one's forward, and each gives its best tokens.
Of all candidates the best N are the tree. P-EAGLE (arXiv 2602.01469) drafts all levels at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.draft_attention import BlockRows, DraftAttentionBuilder
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import DFlashConfig, Eagle3Config
from vllm_specblock.drafters.specblock.growth import expansion
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape

_DEPTH, _NODES_PER_LEVEL = 8, 4  # defaults, see `Eagle3Config.depth`


class Eagle3Drafter(NetworkDrafter):
    """Catch-up on the committed rows and level 1 are one forward; each later level is another.

    To the cache, a level is a block of one position (`draft_attention.py`).
    """

    kind = "eagle3"
    model: Eagle3Model

    def set_shape(self, options: Eagle3Config, lookahead: int) -> None:
        self.embed, vocab = self.model.embedding(self.embed), self.model.config.draft_vocab_size
        self.shape = level_shape(options, self.num_nodes, lookahead, vocab)
        self.max_depth = self.shape.num_blocks

    def bind(self, caches: list[torch.Tensor]) -> None:
        how = self.max_model_len, True, self.model.config.layer_windows
        self.attention_builder = DraftAttentionBuilder(caches, self.shape, *how)
        self.width = torch.tensor(self.shape.branching, device=caches[0].device)

    def _forward(self, rows: CommittedTokens) -> torch.Tensor:
        attend, _ = self.attention_builder.first(rows)
        embedded, feature = self.embed(rows.token), self.model.fuse(rows.features(self.layers))
        return self.model.run(embedded, feature, rows.position, attend, rows.last)

    def draft(self) -> DraftTree:
        model, top_k = self.model, self.shape.width
        state, beta = self.state, self.beta
        growth = expansion(self.shape, self.width, len(state))
        grown = growth.attach(None, *model.best(state[:, None, None], top_k, beta))

        self.attention_builder.begin()
        level = 1
        while isinstance(grown, NextStarts):
            level += 1
            attend, rows = self.attention_builder.next(level, grown)
            embedded, feature = self.embed(grown.token.flatten()), model.carry(state[rows.source])
            state = model.run(embedded, feature, rows.base, attend)
            best = model.best(state.view(*grown.token.shape, 1, -1), top_k, beta)
            grown = growth.attach(grown._replace(valid=rows.valid), *best)
        return grown if isinstance(grown, DraftTree) else DraftTree(*grown[:-1])


class ParallelDrafter(Eagle3Drafter):
    """Catch-up drafts the first tokens; one forward over masks drafts all later ones.

    Masks do not know each other's tokens: a path is as likely as the product of its tokens.
    """

    kind = "peagle"

    @torch.no_grad()
    def set_shape(self, options: DFlashConfig, lookahead: int) -> None:  # type: ignore[override]
        config, num_nodes = self.model.config, self.num_nodes
        assert config.mask_token_id is not None and self.model.mask_hidden is not None
        self.embed = self.model.embedding(self.embed)
        self.max_depth = min(options.depth or _DEPTH, num_nodes, lookahead + 1)
        self.shape = TreeShape.levels(1, 1, 1, num_nodes)  # of the catch-up
        width = min(num_nodes, config.draft_vocab_size)
        self.trees = PathTrees(self.max_depth, width, num_nodes, self.device)
        self.mask = torch.full((self.max_depth - 1,), config.mask_token_id, device=self.device)
        self.feature = self.model.fuse(self.model.mask_hidden)  # of every mask

    def bind(self, caches: list[torch.Tensor]) -> None:
        super().bind(caches)
        windows, size = self.model.config.layer_windows, max(1, len(self.mask))
        self.block_rows = BlockRows(caches, size, [True] * len(caches), windows, self.max_model_len)
        self.attention_builder.word_counts |= self.block_rows.word_counts

    def advance(self, rows: CommittedTokens) -> None:
        super().advance(rows)
        self.rows = replace(rows, states=())

    def draft(self) -> DraftTree:
        model, state = self.model, self.state[:, None]
        masks, requests = len(self.mask), len(state)
        if masks:
            attend, position = self.block_rows.blocks(self.rows)
            embedding = self.embed(self.mask.repeat(requests))
            feature = self.feature.expand_as(embedding)
            drafted = model.run(embedding, feature, position.flatten(), attend)
            state = torch.cat([state, drafted.unflatten(0, (requests, masks))], 1)
        logprob, token = model.best(state, self.trees.width, self.beta)
        if masks:
            logprob[:, 1:] = self.block_rows.drafted(logprob[:, 1:], position)
        return self.trees.grow(logprob, token)


def level_shape(
    options: Eagle3Config, num_nodes: int, lookahead: int, draft_vocab_size: int
) -> TreeShape:
    """Return the shape for `options`, within `lookahead` slots and the draft vocabulary."""
    wanted = options.depth or min(_DEPTH, max(2, num_nodes // _NODES_PER_LEVEL))
    # Every row of level 2 and later borrows one reserved slot.
    depth = min(wanted, num_nodes, lookahead + 1)
    top_k = min(options.top_k, draft_vocab_size)
    width = max(1, min(top_k, lookahead // max(1, depth - 1)))
    return TreeShape.levels(depth, top_k, width, num_nodes)
