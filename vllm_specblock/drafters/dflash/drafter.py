"""DFlash drafter: an existing checkpoint, of whose block the best paths make a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_specblock.candidates import NEVER
from vllm_specblock.config import DFlashConfig
from vllm_specblock.drafters.baselines.product_trees import ProductTrees
from vllm_specblock.drafters.common.chunked_advance import chunked_advance
from vllm_specblock.drafters.dflash.block_rows import BlockRows
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens, Drafter
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.tree import DraftTree


class DFlashDrafter(Drafter):
    """Catch-up makes keys and values and asks nothing; the block of masks is one forward.

    vLLM's own DFlash verifies the likeliest token of every mask. Masks do not know of each other's
    tokens, so a path is as likely as the product of its tokens, and the tree is the best N paths.

    Args:
        model: the loaded model.
        embed: [n] target token ids → [n, H], the target's own embedding.
        options: how far it drafts.
        num_nodes: N.
        max_model_len: tokens of the longest request.
        lookahead_slots: cache slots reserved after the root; default: N.
        layers: which of a step's `states` are read, low layers first.
    """

    kind = "dflash"
    model: DFlashModel

    def __init__(
        self,
        model: DFlashModel,
        embed: Callable[[Tensor], Tensor],
        options: DFlashConfig,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        self.model, self.embed, self.num_nodes = model, embed, num_nodes
        self.max_model_len, self.layers = max_model_len, layers
        config, device = model.config, model.norm.weight.device
        lookahead = num_nodes if lookahead_slots is None else lookahead_slots
        self.max_depth = min(options.depth or config.masks, num_nodes, lookahead)
        width = min(num_nodes, config.vocab_size)
        self.trees = ProductTrees(self.max_depth, width, num_nodes, device)
        self.masks = torch.full((1, self.max_depth), config.mask_token_id, device=device)
        if options.calibrate_drafts:
            self.calibration = DraftCalibration(device)

    def cache_layers(self) -> list[CacheLayer]:
        config = self.model.config
        layer = CacheLayer(config.num_key_value_heads, config.head_dim, 1)
        return [layer] * config.num_hidden_layers

    def bind(self, caches: list[Tensor]) -> None:
        self.block_rows = BlockRows(caches, self.sees(), self.max_model_len)

    def sees(self) -> Tensor:
        """[1 + masks, 1 + masks] bool, which rows of its block a row sees: all of them."""
        size = 1 + self.max_depth
        return torch.ones(size, size, dtype=torch.bool, device=self.masks.device)

    def warm_up(self, block_table: Tensor, most_rows: int) -> None:
        self.block_rows.warm_up(block_table, most_rows, self.model.config.num_attention_heads)

    def advance(self, rows: CommittedTokens) -> None:
        self.rows = rows
        chunked_advance(rows, self._remember)
        self.beta = self.beta_of(rows)  # [R]

    def _remember(self, rows: CommittedTokens) -> Tensor:
        context = self.model.context(rows.features(self.layers), rows.position)
        for layer, (key, value) in enumerate(context):
            self.block_rows.store(layer, rows, key, value)
        return rows.last

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        root, beta = self.rows.token[self.rows.last], self.beta
        if requests is not None:
            root, beta = root[requests], None if beta is None else beta[requests]
        attend, position = self.block_rows.blocks(self.rows, requests)
        tokens = torch.cat([root[:, None], self.masks.expand(len(root), -1)], 1)
        state = self.model(
            self.embed(tokens.flatten()),
            position.flatten(),
            lambda layer, *rows: attend(layer, *(x[:, None] for x in rows))[:, 0],
        )
        state = state.view(*tokens.shape, -1)[:, 1:]
        logprob, token = self.model.best(state, self.trees.width, beta)
        # Masks without a slot have read what is not theirs.
        lost = position[:, 1:, None] >= self.max_model_len
        return self.trees.grow(logprob.masked_fill(lost, NEVER), token)
