"""Medusa (arXiv 2401.10774): K heads on the target's last state, each for one position ahead.

Head k is n residual blocks x + SiLU(W x). The heads share one LM head over the draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from vllm_specblock.config import MedusaConfig
from vllm_specblock.drafters.baselines.config import MedusaShape
from vllm_specblock.drafters.baselines.positions import Positions
from vllm_specblock.drafters.baselines.product_trees import ProductTrees
from vllm_specblock.drafters.common.network_drafter import NetworkDrafter, of_requests
from vllm_specblock.drafters.interface import CacheLayer, CommittedTokens
from vllm_specblock.tree import DraftTree


class MedusaModel(Positions):
    """The heads. Parameter names are those that vLLM's own Medusa loads."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape.hidden_size, shape.draft_vocab_size)
        self.config = shape
        self.blocks = nn.ModuleList(
            ResidualBlocks(shape.hidden_size, shape.num_layers) for _ in range(shape.num_heads)
        )

    def states(self, last: Tensor) -> Tensor:
        """The target's last states [..., Ht], of the drafter's dtype -> [..., K, Ht]."""
        return torch.stack([block(last) for block in self.blocks], dim=-2)


class ResidualBlocks(nn.Module):
    """Those of one position."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., Ht] -> [..., Ht]."""
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class MedusaDrafter(NetworkDrafter):
    """The best N of the product of the heads' distributions, from the newest state alone.

    It reads what the target's LM head reads, and nothing is kept in the cache.
    """

    kind = "medusa"
    model: MedusaModel

    def set_shape(self, options: MedusaConfig, lookahead: int) -> None:
        num_nodes, config = self.num_nodes, self.model.config
        width = min(num_nodes, config.draft_vocab_size)
        self.max_depth = min(num_nodes, config.num_heads)
        self.trees = ProductTrees(self.max_depth, width, num_nodes, self.device)

    def cache_layers(self) -> list[CacheLayer]:
        return []

    def warm_up(self, block_table: Tensor, most_rows: int) -> None:
        """Nothing to compile."""

    def advance(self, rows: CommittedTokens) -> None:
        self.state, self.beta = self._forward(rows), self.beta_of(rows)

    def _forward(self, rows: CommittedTokens) -> Tensor:
        return rows.states[self.layers[0]][rows.source[rows.last]]  # [R, Ht]

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        last, beta = of_requests(requests, self.state, self.beta)
        states = self.model.states(last)[:, : self.max_depth]
        return self.trees.grow(*self.model.best(states, self.trees.width, beta))
