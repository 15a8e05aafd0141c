"""DFlash drafter: the tree is the N best paths through one block of masks.

A JetSpec drafter (arXiv 2606.18394) is one with causal blocks. Its authors' tree gives the
likeliest node without children the likeliest tokens of the next mask, until N nodes are there; here
it is the N likeliest paths, of which that tree leaves some out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.candidates import NEVER
from vllm_specblock.config import DFlashConfig
from vllm_specblock.drafters.common.chunked_advance import chunked_advance
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.dflash.block_rows import BlockRows
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.dflash.product_trees import ProductTrees
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.tree import DraftTree


class DFlashDrafter(NetworkDrafter):
    """Catch-up makes keys and values and asks nothing; the block of masks is one forward.

    vLLM's own DFlash verifies the likeliest token of every mask. Masks do not know of each other's
    tokens, so a path is as likely as the product of its tokens, and the tree is the best N paths.
    """

    kind = "dflash"
    model: DFlashModel

    def set_shape(self, options: DFlashConfig, lookahead: int) -> None:
        num_nodes, config, device = self.num_nodes, self.model.config, self.device
        if config.causal:
            self.kind = "jetspec"
        self.max_depth = min(options.depth or config.masks, num_nodes, lookahead)
        width = min(num_nodes, len(self.model.d2t))
        self.trees = ProductTrees(self.max_depth, width, num_nodes, device)
        self.masks = torch.full((1, self.max_depth), config.mask_token_id, device=device)

    def bind(self, caches: list[Tensor]) -> None:
        size = 1 + self.max_depth
        sees = torch.ones(size, size, dtype=torch.bool, device=self.device)
        sees = sees.tril() if self.model.config.causal else sees
        self.attention_builder = BlockRows(caches, sees, self.max_model_len)

    def advance(self, rows: CommittedTokens) -> None:
        self.rows = rows
        chunked_advance(rows, self._forward)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        context = self.model.context(rows.features(self.layers), rows.position)
        for layer, (key, value) in enumerate(context):
            self.attention_builder.store(layer, rows, key, value)
        return rows.last

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        root, beta = of_requests(requests, self.rows.token[self.rows.last], self.beta)
        attend, position = self.attention_builder.blocks(self.rows, requests)
        tokens = torch.cat([root[:, None], self.masks.expand(len(root), -1)], 1)
        state = self.model(self.embed(tokens.flatten()), position.flatten(), attend)
        state = state.view(*tokens.shape, -1)[:, 1:]
        logprob, token = self.model.best(state, self.trees.width, beta)
        # Masks without a slot have read what is not theirs.
        lost = position[:, 1:, None] >= self.max_model_len
        return self.trees.grow(logprob.masked_fill(lost, NEVER), token)
