"""DFlash drafter: the tree is the best N paths through one block of masks.

A JetSpec drafter (arXiv 2606.18394) is one with causal blocks. Its authors' tree, which expands the
likeliest leaf until there are N nodes, leaves out some of the N likeliest paths. DFlash2 and DSpark
score a token by the one before it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_specblock.commit import store_kv
from vllm_specblock.committed import CommittedTokens, in_parts
from vllm_specblock.drafters.common.draft_attention import BlockRows
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.options import DFlashConfig
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.tree import DraftTree


class DFlashDrafter(NetworkDrafter):
    """Catch-up only makes keys and values; the block of masks is one forward.

    Masks do not know each other's tokens: a path is as likely as the product of its tokens. With a
    pair head it is the product over pairs of neighbours.
    """

    kind = "dflash"
    model: DFlashModel

    def set_shape(self, options: DFlashConfig, lookahead: int) -> None:
        num_nodes, config, device = self.num_nodes, self.model.config, self.device
        self.kind, self.embed = config.kind, self.model.embedding(self.embed)
        in_pairs = bool(config.markov_rank or config.selector_rank)
        self.max_depth = min(options.depth or config.masks + config.from_root, num_nodes, lookahead)
        width = min(config.selector_top_k if in_pairs else num_nodes, config.draft_vocab_size)
        self.trees = PathTrees(self.max_depth, width, num_nodes, device, in_pairs)
        masks = self.max_depth - config.from_root
        self.masks = torch.full((1, masks), config.mask_token_id, device=device)

    def bind(self, caches: list[Tensor]) -> None:
        config, size = self.model.config, 1 + self.masks.shape[1]
        self.attention_builder = BlockRows(
            caches, size, config.layer_causal, config.layer_windows, self.max_model_len
        )

    def advance(self, rows: CommittedTokens) -> None:
        self.root = rows.token[rows.last]
        self.rows = replace(rows, states=())  # of a prompt hundreds of megabytes
        in_parts(rows, self._forward)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        context, builder = rows.features(self.layers), self.attention_builder
        for cache, kv in zip(builder.caches, self.model.context(context, rows.position)):
            store_kv(cache, rows.kv_slot, *kv, packing=builder.packing)
        return rows.last

    def draft(self) -> DraftTree:
        root, first = self.root, not self.model.config.from_root
        attend, position = self.attention_builder.blocks(self.rows)
        tokens = torch.cat([root[:, None], self.masks.expand(len(root), -1)], 1)
        state = self.model(self.embed(tokens.flatten()), position, attend).view(*tokens.shape, -1)
        logprob, token = self.model.choices(state[:, first:], root, self.trees.width, self.beta)
        return self.trees.grow(self.attention_builder.drafted(logprob, position[:, first:]), token)
