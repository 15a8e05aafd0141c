"""ParallelSpec (arXiv 2410.05589): one forward drafts K positions, by mask tokens after the text.

A row is the target's features of x_i fused with the token x_{i+1}, as EAGLE's; position 1 is read
from the row itself, positions 2..K from K − 1 learned mask tokens at the next RoPE positions. Masks
see the rows up to their own and the masks before them, which is plain causal order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_specblock.candidates import NEVER
from vllm_specblock.config import ParallelSpecConfig
from vllm_specblock.drafters.baselines.causal_rows import CausalRows
from vllm_specblock.drafters.baselines.positions import Positions
from vllm_specblock.drafters.baselines.product_trees import ProductTrees
from vllm_specblock.drafters.baselines.trunk import Trunk
from vllm_specblock.drafters.common.layers import RMSNorm
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.tree import DraftTree


class ParallelSpecModel(Positions):
    """The trunk, the mask tokens and the LM head; `config.block_size` is K."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.hidden_size, config.draft_vocab_size)
        self.config = config
        self.trunk = Trunk(config)
        self.mask_tokens = nn.Parameter(torch.randn(config.block_size - 1, config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)


class ParallelSpecDrafter(NetworkDrafter):
    """Catch-up on the committed rows and the K positions are one forward, and all there is."""

    kind = "parallelspec"
    model: ParallelSpecModel

    def set_shape(self, options: ParallelSpecConfig, lookahead: int) -> None:
        num_nodes, config = self.num_nodes, self.model.config
        self.max_depth = min(num_nodes, config.block_size, lookahead + 1)
        width = min(num_nodes, config.draft_vocab_size)
        self.trees = ProductTrees(self.max_depth, width, num_nodes, self.device)

    def bind(self, caches: list[Tensor]) -> None:
        self.attention_builder = CausalRows(caches, self.max_model_len)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        model, count = self.model, self.max_depth - 1
        condition = model.trunk.condition(rows.features(self.layers))
        real = model.trunk.entry(condition, self.embed(rows.token))
        masks = model.mask_tokens[:count].to(real.dtype).repeat(len(rows.last), 1)
        attend, position, keep = self.attention_builder.first(rows, count, keep_newest=True)
        # RoPE has a row where its token stands, one further than its slot.
        states = model.trunk(torch.cat([real, masks]), position + 1, attend, keep)
        return states.view(len(rows.last), self.max_depth, -1)

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        states, beta = of_requests(requests, self.state, self.beta)
        self.attention_builder.begin(requests)
        logprob, token = self.model.best(states, self.trees.width, beta)
        # Masks without a slot have read what is not theirs.
        lost = ~self.attention_builder.there(self.max_depth - 1)[..., None]
        logprob = torch.cat([logprob[:, :1], logprob[:, 1:].masked_fill(lost, NEVER)], 1)
        return self.trees.grow(logprob, token)
