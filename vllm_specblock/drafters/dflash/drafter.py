"""DFlash drafter: the tree is the best N paths through one block of masks.

A JetSpec drafter (arXiv 2606.18394) is one with causal blocks. Its authors' tree, which expands the
likeliest leaf until there are N nodes, leaves out some of the N likeliest paths. DFlash2 and DSpark
score a token by the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_specblock.candidates import NEVER
from vllm_specblock.commit import store_kv
from vllm_specblock.committed import CommittedTokens, in_parts
from vllm_specblock.drafters.common.draft_attention import PagedAttention
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.options import DFlashConfig
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits


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
        drafted, in_pairs = config.masks + config.from_root, config.pair_rank is not None
        self.max_depth = min(options.depth or drafted, num_nodes, lookahead)
        width = min(config.pair_width if in_pairs else num_nodes, config.draft_vocab_size)
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


class BlockRows:
    """Builds the PagedAttention of a step's blocks, which borrow the slots of the tokens to come.

    Args:
        size: S, rows of a block.
        causal: of each layer, whether its rows see no later row of their block.
        windows: see `NetworkShape.layer_windows`. Without `causal` all rows of a block see as many
            entries before it.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(
        self,
        caches: list[Tensor],
        size: int,
        causal: Sequence[bool],
        windows: Sequence[int | None],
        max_position: int,
    ) -> None:
        self.caches, self.size, self.max_position = caches, size, max_position
        self.packing, self.causal = packing_on_cpu(caches[0]), causal
        self.windows = [
            window if window is None or alone else window + size
            for window, alone in zip(windows, causal)
        ]
        self.offset = torch.arange(size, device=caches[0].device)
        sees = torch.ones(size, size, dtype=torch.bool, device=caches[0].device)
        words = {False: pack_bits(sees), True: pack_bits(sees.tril())}
        self.mask_words = {each: words[each] for each in {*causal}}  # [S, W]
        self.rows_per_token, self.word_counts = size, {words[True].shape[-1]}

    def drafted(self, logprob: Tensor, position: Tensor) -> Tensor:
        """Return logprob [R, K, ...] of rows at position [R, K] without those that have no slot."""
        lost = (position >= self.max_position).view(*position.shape, *[1] * (logprob.dim() - 2))
        return logprob.masked_fill(lost, NEVER)

    def blocks(self, rows: CommittedTokens) -> tuple[PagedAttention, Tensor]:
        """Return the attention over R·S rows, block by block, and their positions [R, S] int64.

        A block follows the newest row of each request.
        """
        table, size, last, count = rows.block_table, self.size, rows.last, len(rows.last)
        first = rows.index[last] + 1
        index = first[:, None] + self.offset
        position = rows.position[last, None] + 1 + self.offset
        block = (index // rows.block_size).clamp(max=table.shape[1] - 1)
        kv_slot = table.gather(1, block).long() * rows.block_size + index % rows.block_size
        kv_slot = torch.where(position < self.max_position, kv_slot, -1)
        first = first.int()
        ahead = (
            table,
            torch.arange(0, count * size + 1, size, dtype=torch.int32, device=last.device),
            [size * request for request in range(count + 1)],
            (first + size).clamp(max=self.max_position),
            min(rows.max_position + 1 + size, self.max_position),
            first.repeat_interleave(size),  # dense, which a view of one request is not
        )
        queries = {
            each: TreeAttentionBatch(*ahead, words.repeat(count, 1), first)
            for each, words in self.mask_words.items()
        }
        of_layers = [queries[each] for each in self.causal]
        return PagedAttention(self.caches, kv_slot.view(-1, 1), of_layers, self.windows), position
