"""DFlash drafter: the tree is the best N paths through one block of masks.

A JetSpec drafter (arXiv 2606.18394) is one with causal blocks. Its authors' tree, which expands the
likeliest leaf until there are N nodes, leaves out some of the N likeliest paths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.candidates import NEVER, select_nodes
from vllm_specblock.commit import store_kv
from vllm_specblock.drafters.common.draft_attention import PagedAttention
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, in_parts
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.options import DFlashConfig
from vllm_specblock.tree import DraftTree, pack_bits
from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)


class DFlashDrafter(NetworkDrafter):
    """Catch-up only makes keys and values; the block of masks is one forward.

    Masks do not know each other's tokens, so a path is as likely as the product of its tokens.
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
        in_parts(rows, self._forward)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        context, builder = rows.features(self.layers), self.attention_builder
        for cache, kv in zip(builder.caches, self.model.context(context, rows.position)):
            store_kv(cache, rows.kv_slot, *kv, packing=builder.packing)
        return rows.last

    def draft(self) -> DraftTree:
        root = self.rows.token[self.rows.last]
        attend, position = self.attention_builder.blocks(self.rows)
        tokens = torch.cat([root[:, None], self.masks.expand(len(root), -1)], 1)
        state = self.model(self.embed(tokens.flatten()), position.flatten(), attend)
        state = state.view(*tokens.shape, -1)[:, 1:]
        logprob, token = self.model.best(state, self.trees.width, self.beta)
        # Masks without a slot have read other entries.
        lost = position[:, 1:, None] >= self.max_model_len
        return self.trees.grow(logprob.masked_fill(lost, NEVER), token)


class BlockRows:
    """Builds the PagedAttention of a step's blocks, which borrow the slots of the tokens to come.

    Args:
        sees: [S, S] bool, which rows of its block (the root, then its masks) each row sees.
        max_position: positions at or beyond it have no slot (the model's length limit).
    """

    def __init__(self, caches: list[Tensor], sees: Tensor, max_position: int) -> None:
        self.caches, self.size, self.max_position = caches, len(sees), max_position
        self.packing = packing_on_cpu(caches[0])
        self.offset = torch.arange(self.size, device=caches[0].device)
        self.mask_words = pack_bits(sees)  # [S, W]
        self.rows_per_token, self.word_counts = self.size, {self.mask_words.shape[-1]}

    def blocks(self, rows: CommittedTokens) -> tuple[PagedAttention, Tensor]:
        """Return the attention over R·S rows, block by block, and their positions [R, S] int64.

        A block follows the newest row of each request.
        """
        table, size, last = rows.block_table, self.size, rows.last
        count = len(last)
        first, ahead = rows.index[last] + 1, rows.position[last, None] + 1
        index, position = first[:, None] + self.offset, ahead + self.offset
        block = (index // rows.block_size).clamp(max=table.shape[1] - 1)
        kv_slot = table.gather(1, block).long() * rows.block_size + index % rows.block_size
        kv_slot = torch.where(position < self.max_position, kv_slot, -1)
        first = first.int()
        queries = TreeAttentionBatch(
            table,
            torch.arange(0, count * size + 1, size, dtype=torch.int32, device=last.device),
            [size * request for request in range(count + 1)],
            (first + size).clamp(max=self.max_position),
            min(rows.max_position + 1 + size, self.max_position),
            first.repeat_interleave(size),  # dense, which a view of one request is not
            self.mask_words.repeat(count, 1),
            first,
        )
        return PagedAttention(self.caches, kv_slot.view(-1, 1), queries), position


class ProductTrees:
    """Finds the best N of R requests' paths through K positions of B = `width` choices, exactly.

    With parents and choices from best to worst, child j of parent i is no better than the i·j − 1
    others of numbers up to i and j: only those with i·j ≤ N can be among the best N. Ties go to
    the lower depth. No value is read on the host.
    """

    def __init__(self, positions: int, width: int, budget: int, device: torch.device | str) -> None:
        self.width, self.budget, self.max_depth = min(width, budget), budget, positions
        pairs = [
            (parent, choice)
            for parent in range(budget)
            for choice in range(min(self.width, budget // (parent + 1)))
        ]
        self.parent, self.choice = torch.tensor(pairs, device=device).T
        depth = torch.arange(1, positions + 1, device=device)
        self.depth = depth.repeat_interleave(budget)[None]  # [1, K·N]

    def grow(self, logprob: Tensor, token: Tensor) -> DraftTree:
        """Return R trees of N slots.

        Args:
            logprob: [R, K, ≥ B] float32, descending, in nats; −inf: no choice.
            token: [R, K, ≥ B] int64, target ids, different ones within a position.
        """
        logprob, unused = logprob[..., : self.width].clamp(max=0), (0, self.budget - self.width)
        # N nodes per level, the best first; node n of level k is candidate (k − 1)·N + n + 1.
        scores = [pad(logprob[:, 0], unused, value=NEVER)]
        tokens = [pad(token[:, 0, : self.width], unused)]
        parents = [torch.zeros_like(tokens[0])]
        for level in range(1, self.max_depth):
            score = scores[-1][:, self.parent] + logprob[:, level, self.choice]
            best = score.topk(self.budget)
            scores.append(best.values)
            tokens.append(token[:, level].gather(1, self.choice[best.indices]))
            parents.append(self.parent[best.indices] + 1 + (level - 1) * self.budget)
        token, parent, score = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return select_nodes(token, parent, score, self.depth, None, self.budget, self.max_depth)
