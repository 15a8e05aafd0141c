"""ParallelSpec (arXiv 2410.05589): one forward drafts K positions, by mask tokens after the text.

A row is the target's features of x_i fused with the token x_{i+1}, as EAGLE's; position 1 is read
from the row itself, positions 2..K from K − 1 learned mask tokens at the next RoPE positions, in
causal order. In training all rows append their masks at once: row i's masks see the rows up to i
and earlier masks of their own group (the paper's group-wise attention).
Simplified: features of three target layers and a reduced vocabulary, as all drafters here have;
two decoder layers; cross-entropy to the target's law and no loss on features; a tree that is the
best N of the product of the positions' distributions.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from baselines.group_attention import GroupRows, joined, newest_rows, rows_after
from baselines.groups import Trunk, earlier_rows, group_attention
from baselines.options import ParallelSpecConfig
from baselines.positions import Positions, PositionsLearner, served
from vllm_specblock.candidates import NEVER
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.drafters.common.layers import RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.train.learner import Draft, EvalSequence, LossOutput, TrainBatch
from vllm_specblock.tree import DraftTree


class ParallelSpecModel(Positions):
    """The trunk, the mask tokens and the LM head; `config.block_size` is K."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.hidden_size, config.draft_vocab_size)
        self.config = config
        self.trunk = Trunk(config)
        self.mask_tokens = nn.Parameter(torch.randn(config.block_size - 1, config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class ParallelSpecDrafter(NetworkDrafter):
    """Catch-up on the committed rows and the K positions are one forward, and all there is."""

    kind = "parallelspec"
    model: ParallelSpecModel

    def set_shape(self, options: ParallelSpecConfig, lookahead: int) -> None:
        num_nodes, config = self.num_nodes, self.model.config
        self.max_depth = min(num_nodes, config.block_size, lookahead + 1)
        width = min(num_nodes, config.draft_vocab_size)
        self.trees = PathTrees(self.max_depth, width, num_nodes, self.device)

    def bind(self, caches: list[Tensor]) -> None:
        self.attention_builder = GroupRows(caches, 1, self.max_model_len)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        model, count = self.model, self.max_depth - 1
        condition = model.trunk.condition(rows.features(self.layers))
        real = model.trunk.entry(condition, self.embed(rows.token))
        masks = model.mask_tokens[:count].to(real.dtype).repeat(len(rows.last), 1)
        both = joined(rows, rows_after(newest_rows(rows), count, self.max_model_len))
        attend, _, keep = self.attention_builder.first(both)
        # RoPE has a row where its token stands, one further than its slot.
        states = model.trunk(torch.cat([real, masks]), both.position + 1, attend, keep)
        first, masks = states.split([len(rows.last), len(masks)])
        return torch.cat([first[:, None], masks.view(len(first), count, first.shape[-1])], 1)

    def draft(self) -> DraftTree:
        logprob, token = self.model.best(self.state, self.trees.width, self.beta)
        # Masks without a slot have read what is not theirs.
        ahead = torch.arange(self.max_depth, device=self.device)
        position = self.attention_builder.rows.position[:, None] + ahead
        lost = (position >= self.max_model_len) & (ahead > 0)
        return self.trees.grow(logprob.masked_fill(lost[..., None], NEVER), token)


class ParallelSpec(PositionsLearner, ParallelSpecModel):
    """See the module; `config.block_size` is K."""

    config_class = DrafterConfig
    defaults: ClassVar = {"block_size": 8}

    def forward(self, train_batch: TrainBatch) -> LossOutput:
        batch, rows = train_batch.batch, slice(0, train_batch.batch.tokens.shape[1] - 1)
        embedding = train_batch.embed(batch.tokens[:, 1:].clamp(min=0))
        condition = self.trunk.condition(train_batch.target_outputs.hidden[:, rows])
        real = self.trunk.entry(condition, embedding)[:, :, None]
        masks = self.mask_tokens.to(real.dtype).expand(*real.shape[:2], -1, -1)
        entries = torch.cat([real, masks], 2)  # [B, L − 1, K, H]
        sees = earlier_rows(batch.document[:, rows])
        count = torch.arange(self.config.block_size, device=real.device)
        causal = count[:, None] >= count

        def attend(_: int, *flat: Tensor) -> Tensor:
            query, key, value = (each.view(*entries.shape[:3], *each.shape[2:]) for each in flat)
            seen = key[:, :, 0], value[:, :, 0]
            mixed = group_attention(query, seen, (key, value), sees, causal)
            return mixed.flatten(0, 2)[:, None]

        states = self.trunk(entries, batch.position[:, rows, None] + 1 + count, attend)
        return self.outcome(states, train_batch, [1.0] * self.config.block_size)

    def draft_along(self, sequence: EvalSequence) -> Draft:
        return served(ParallelSpecDrafter, self, self.budget, sequence)
