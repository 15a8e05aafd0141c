"""Medusa (arXiv 2401.10774): K heads on the target's last state, each for one position ahead.

Head k is n residual blocks x + SiLU(W x). The heads share one LM head over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from vllm_specblock.config import MedusaConfig
from vllm_specblock.drafters.baselines.config import MedusaShape
from vllm_specblock.drafters.baselines.positions import Positions
from vllm_specblock.drafters.baselines.product_trees import ProductTrees
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.feedback.calibration import DraftCalibration
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


class MedusaDrafter(Drafter):
    """The best N of the product of the heads' distributions, from the newest state alone.

    Args:
        model: the loaded model.
        embed: not read: other drafters take it.
        options: nothing of the tree is left to choose.
        num_nodes: N.
        max_model_len, lookahead_slots: not read, since nothing is kept in the cache.
        layers: which of a step's `states` is what the target's LM head reads.
    """

    kind = "medusa"
    model: MedusaModel

    def __init__(
        self,
        model: MedusaModel,
        embed: Callable[[Tensor], Tensor],
        options: MedusaConfig,
        num_nodes: int,
        max_model_len: int,
        lookahead_slots: int | None = None,
        layers: tuple[int, ...] = (0,),
    ) -> None:
        self.model, self.num_nodes = model, num_nodes
        (self.layer,) = layers
        device = model.d2t.device
        width = min(num_nodes, model.config.draft_vocab_size)
        self.max_depth = min(num_nodes, model.config.num_heads)
        self.trees = ProductTrees(self.max_depth, width, num_nodes, device)
        if options.calibrate_drafts:
            self.calibration = DraftCalibration(device)

    def advance(self, rows: CommittedTokens) -> None:
        self.last = rows.states[self.layer][rows.source[rows.last]]  # [R, Ht]
        self.beta = self.beta_of(rows)  # [R]

    def draft(self, requests: Tensor | None = None) -> DraftTree:
        last, beta = self.last, self.beta
        if requests is not None:
            last, beta = last[requests], None if beta is None else beta[requests]
        states = self.model.states(last)[:, : self.max_depth]
        return self.trees.grow(*self.model.best(states, self.trees.width, beta))
